// Vercel's `ai` with `@ai-sdk/openai-compatible`.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, CAPITAL, KEY, MODEL, run } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "kvrelay",
  baseURL: BASE,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ASK = {
  model: provider(MODEL),
  prompt: CAPITAL,
  temperature: 0,
  maxOutputTokens: 64,
  maxRetries: 0,
};
const City = z.object({
  name: z.string(),
  continent: z.enum(["Africa", "America", "Asia", "Europe"]),
});
const tools = {
  get_weather: tool({
    description: "The weather here.",
    inputSchema: z.object({ unit: z.enum(["celsius", "fahrenheit"]) }),
    execute: async ({ unit }) => `sunny, 20 degrees ${unit}`,
  }),
};

async function text_is_generated() {
  const { text, usage, finishReason } = await generateText(ASK);
  assert.match(text, /Paris/);
  assert.ok(usage.outputTokens > 0);
  assert.ok(["stop", "length"].includes(finishReason));
  return text;
}

async function text_streams_as_it_is_generated() {
  const whole = await generateText(ASK);
  const stream = streamText(ASK);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
}

async function the_completions_model_answers() {
  const model = provider.completionModel(MODEL);
  const { text } = await generateText({ ...ASK, model, prompt: "Say it.", maxOutputTokens: 8 });
  assert.ok(text.length > 0);
}

const ONCE = { kvrelay: { parallel_tool_calls: false } };

async function an_agent_calls_its_tool_and_answers() {
  const { steps, text } = await generateText({
    ...ASK,
    tools,
    providerOptions: ONCE,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.match(steps[0].toolResults[0].output, /^sunny, 20 degrees/);
  assert.ok(text.length > 0);
  return text.slice(0, 60);
}

async function tool_calls_stream() {
  const stream = streamText({ ...ASK, tools, providerOptions: ONCE, toolChoice: "required" });
  const kinds = [];
  for await (const part of stream.fullStream) kinds.push(part.type);
  assert.ok(kinds.includes("tool-call") && kinds.includes("tool-result"), kinds.join());
  assert.ok(kinds.includes("tool-input-delta"));
}

async function objects_are_generated() {
  const { output } = await generateText({ ...ASK, output: Output.object({ schema: City }) });
  City.parse(output);
  return JSON.stringify(output);
}

async function objects_stream() {
  const stream = streamText({ ...ASK, output: Output.object({ schema: City }) });
  let last;
  for await (const part of stream.partialOutputStream) last = part;
  City.parse(last);
}

await run(
  text_is_generated,
  text_streams_as_it_is_generated,
  the_completions_model_answers,
  an_agent_calls_its_tool_and_answers,
  tool_calls_stream,
  objects_are_generated,
  objects_stream,
);
