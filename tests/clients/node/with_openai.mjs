// `openai` for Node, as its documentation uses it.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, CAPITAL, KEY, MODEL, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const ASK = [{ role: "user", content: CAPITAL }];
const CHAT = { model: MODEL, messages: ASK, temperature: 0, max_tokens: 64 };
const City = z.object({
  name: z.string(),
  continent: z.enum(["Africa", "America", "Asia", "Europe"]),
});
const UNIT = { type: "string", enum: ["celsius", "fahrenheit"] };
const WEATHER = {
  name: "get_weather",
  description: "The weather here.",
  parameters: {
    type: "object",
    properties: { unit: UNIT },
    required: ["unit"],
    additionalProperties: false,
  },
};
const TOOL = { type: "function", function: WEATHER };

async function models_are_listed() {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL]);
}

async function chat_answers() {
  const answer = await client.chat.completions.create(CHAT);
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.ok(answer.usage.completion_tokens > 0);
  return answer.choices[0].message.content;
}

async function chat_streams_what_it_answers() {
  const whole = await client.chat.completions.create(CHAT);
  let text = "";
  let usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...CHAT, ...options })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
}

async function completions_with_echo_and_logprobs() {
  const prompt = "The capital of France is";
  const settings = { model: MODEL, prompt, temperature: 0, max_tokens: 4, echo: true, logprobs: 1 };
  const { choices } = await client.completions.create(settings);
  assert.equal(choices[0].logprobs.tokens.join(""), choices[0].text);
}

async function a_required_tool_is_called() {
  const answer = await client.chat.completions.create({
    ...CHAT,
    tools: [TOOL],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.ok(UNIT.enum.includes(JSON.parse(call.function.arguments).unit));
  return call.function.arguments;
}

async function the_tool_runner_calls_functions_and_answers() {
  let called = 0;
  const runner = client.chat.completions.runTools({
    ...CHAT,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      {
        type: "function",
        function: {
          ...WEATHER,
          parse: JSON.parse,
          function: ({ unit }) => {
            called += 1;
            return `sunny, 20 degrees ${unit}`;
          },
        },
      },
    ],
  });
  await runner.done();
  assert.equal(called, 1); // with a named function it stops after its call
}

async function parse_gives_the_object() {
  const answer = await client.chat.completions.parse({
    ...CHAT,
    response_format: zodResponseFormat(City, "city"),
  });
  City.parse(answer.choices[0].message.parsed);
  return JSON.stringify(answer.choices[0].message.parsed);
}

async function leaving_a_stream_ends_it() {
  const stream = await client.chat.completions.create({ ...CHAT, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
}

async function wrong_requests_are_its_own_errors() {
  await assert.rejects(
    client.chat.completions.create({ ...CHAT, temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
}

await run(
  models_are_listed,
  chat_answers,
  chat_streams_what_it_answers,
  completions_with_echo_and_logprobs,
  a_required_tool_is_called,
  the_tool_runner_calls_functions_and_answers,
  parse_gives_the_object,
  leaving_a_stream_ends_it,
  wrong_requests_are_its_own_errors,
);
