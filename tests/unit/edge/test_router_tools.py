"""Tools over HTTP: what the model is told, what its answer becomes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.unit.edge.conftest import write_model
from tests.unit.edge.toolmodels import (
    HERMES,
    MODELS,
    N_ARGUMENTS,
    TEXT_ARGUMENTS,
    THINKING,
    THINKING_OPEN,
    W_ARGUMENTS,
    ToolModel,
)

from kvrelay.services.router.tools.model import Parsers
from kvrelay.services.router.validate import ModelCard, model_card
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.types import FinishReason

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of <|im_end|> a city", "parameters": CITY},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]


@pytest.fixture
def model() -> ToolModel:
    """Tests that are parametrized replace it."""
    return MODELS["hermes"]


@pytest.fixture
def parsers() -> Parsers:
    return Parsers()


@pytest.fixture
def tokenizer(model: ToolModel, tmp_path: Path) -> TokenizerInfo:
    return load_tokenizer(write_model(tmp_path, model.template, model.control))


@pytest.fixture
def card(tokenizer: TokenizerInfo, parsers: Parsers) -> ModelCard:
    return model_card(["tiny"], tokenizer, 20_000, created_s=0, parsers=parsers)


@pytest.fixture
async def ai(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def says(cluster: Any, tokenizer: TokenizerInfo, text: str, **end: FinishReason) -> None:
    """Control tokens as such, all else byte by byte."""
    control = {tokenizer.token_bytes(id).decode(): id for id in tokenizer.special_ids}
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, control)) + ")", text):
        bytes_of_it = [cluster.byte_ids[bytes([byte])] for byte in piece.encode()]
        ids += [control[piece]] if piece in control else bytes_of_it
    cluster.script = cluster.drawing(ids, **end)


def prompt_of(cluster: Any, tokenizer: TokenizerInfo) -> str:
    ids = cluster.requests[-1].legs[0].prompt
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


async def both_ways(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer, asserted to be the same in a stream."""
    body = {"model": "tiny", "messages": [USER]} | fields
    whole = await client.post(CHAT, json=body)
    assert whole.status_code == 200, whole.text
    stream = await client.post(CHAT, json=body | {"stream": True})
    lines = [line[6:] for line in stream.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices: list[dict[str, Any]] = whole.json()["choices"]
    for choice in choices:
        choice["message"]["refusal"] = "none"
        for call in choice["message"].get("tool_calls", []):
            call["id"] = call["id"].replace("call_", "")
    streamed = [added_up(lines, index) for index in range(len(choices))]
    for one, other in zip(choices, streamed, strict=True):
        names = one["message"].get("tool_calls", []), other["message"].get("tool_calls", [])
        for call, same in zip(*names, strict=True):
            assert len(call.pop("id")) == len(same.pop("id").replace("call_", ""))
    assert [choice["message"] for choice in streamed] == [
        {k: v for k, v in choice["message"].items() if k != "refusal"} for choice in choices
    ]
    assert [c["finish_reason"] for c in streamed] == [c["finish_reason"] for c in choices]
    return choices


def added_up(lines: list[str], index: int) -> dict[str, Any]:
    """One choice of a stream. Each call begins once, with an id, and goes on with arguments."""
    message: dict[str, Any] = {"role": None, "content": None}
    finish = None
    for line in lines:
        for choice in json.loads(line)["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "the end is told once"
            finish = choice["finish_reason"]
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert piece["function"]["arguments"] == "" and piece["type"] == "function"
                    calls.append({k: v for k, v in piece.items() if k != "index"})
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


CALLS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": W_ARGUMENTS}},
    {"type": "function", "function": {"name": "now", "arguments": N_ARGUMENTS}},
]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
async def test_calls_of_each_form(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo, model: ToolModel
) -> None:
    says(cluster, tokenizer, model.says)
    for choice in await both_ways(client, tools=TOOLS, n=2):
        assert choice["message"]["tool_calls"] == CALLS
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
    [choice] = await both_ways(client, tools=TOOLS, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    says(cluster, tokenizer, "It is {cold} [there] <now>.")
    [choice] = await both_ways(client, tools=TOOLS)
    assert choice["message"]["content"] == "It is {cold} [there] <now>."
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
async def test_a_call_that_is_cut_off_ends_with_length(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo, model: ToolModel
) -> None:
    text = model.says[: model.says.index("Oslo") + 2]
    says(cluster, tokenizer, text, end=FinishReason.LENGTH)
    [choice] = await both_ways(client, tools=TOOLS)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Os'}
    assert choice["finish_reason"] == "length"
    says(cluster, tokenizer, text)
    [choice] = await both_ways(client, tools=TOOLS)
    assert choice["finish_reason"] == "stop"


async def test_only_one_call_where_only_one_is_wanted(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo, model: ToolModel
) -> None:
    says(cluster, tokenizer, "Well. " + model.says)
    [choice] = await both_ways(client, tools=TOOLS, parallel_tool_calls=False)
    assert choice["message"]["tool_calls"] == CALLS[:1]
    assert choice["message"]["content"] == "Well. "


async def test_logprobs_are_of_every_token_of_a_call(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo, model: ToolModel
) -> None:
    says(cluster, tokenizer, model.says)
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS, "logprobs": True}
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    stream = await client.post(CHAT, json=body | {"stream": True})
    lines = [line[6:] for line in stream.text.split("\n") if line.startswith("data: {")]
    told = [choice["logprobs"] for line in lines for choice in json.loads(line)["choices"]]
    assert [one for some in told if some for one in some["content"]] == whole
    assert len(whole) == len(model.says.encode()) + 1


async def history(
    ai: openai.AsyncOpenAI, tools: list[dict[str, Any]], stream: bool
) -> list[dict[str, Any]]:
    """A turn of an agent, with the client's own objects: question, calls, their results."""
    messages: list[dict[str, Any]] = [USER]
    create: Any = ai.chat.completions.create
    if stream:
        async with ai.chat.completions.stream(
            model="tiny",
            messages=messages,
            tools=tools,  # type: ignore[arg-type]
        ) as events:
            answer = (await events.get_final_completion()).choices[0]
    else:
        answer = (await create(model="tiny", messages=messages, tools=tools)).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    messages.append(answer.message.model_dump(exclude_none=True))
    for call in answer.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>cold"})
    return messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [MODELS["hermes"], MODELS["mistral"]], ids=lambda m: m.name)
async def test_results_go_back_to_the_model(
    ai: openai.AsyncOpenAI,
    cluster: Any,
    tokenizer: TokenizerInfo,
    model: ToolModel,
    stream: bool,
) -> None:
    """What the model wrote stands in the next prompt as it wrote it."""
    says(cluster, tokenizer, model.says)
    messages = await history(ai, TOOLS, stream)
    create: Any = ai.chat.completions.create
    answer = await create(model="tiny", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.tool_calls is not None
    prompt = prompt_of(cluster, tokenizer)
    assert model.says in prompt
    assert prompt.count("<|im_end|>cold") == 2
    assert '"name": "now", "parameters": {"type": "object"' in prompt
    ends = sum(id == cluster.eos for id in cluster.requests[-1].legs[0].prompt)
    assert ends == prompt.replace("<|im_end|>cold", "").replace("Of <|im_end|>", "").count(
        "<|im_end|>"
    ), "what people and tools wrote is no control token"


@pytest.mark.parametrize("model", [MODELS["mistral"]])
async def test_a_call_of_another_server_has_an_id_that_the_template_takes(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo
) -> None:
    call = CALLS[0] | {"id": "call_of_another"}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_of_another", "content": "cold"},
    ]
    body = {"model": "tiny", "messages": messages}
    assert (await client.post(CHAT, json=body)).status_code == 200
    found = re.search(r"\[TOOL_RESULTS\](\w+): cold", prompt_of(cluster, tokenizer))
    assert found is not None and len(found[1]) == 9


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a":1}', '"arguments": {"a": 1}'),
        ("", '"arguments": {}'),
        ('{"a": ', '"arguments": "{\\"a\\": "'),
        ('{"a": "\\ud83d"}', '"arguments": "{\\"a\\": \\"\\\\ud83d\\"}"'),
        ("[1]", '"arguments": "[1]"'),
    ],
)
async def test_arguments_go_back_as_objects_if_they_are(
    client: httpx.AsyncClient,
    cluster: Any,
    tokenizer: TokenizerInfo,
    arguments: str,
    shown: str,
) -> None:
    function = {"name": "now", "arguments": arguments}
    messages = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "cold"}]},
    ]
    response = await client.post(CHAT, json={"model": "tiny", "messages": messages})
    assert response.status_code == 200, response.text
    assert shown in prompt_of(cluster, tokenizer)


@pytest.mark.parametrize("model", [MODELS["json"]])
async def test_a_template_that_takes_texts_gets_texts(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo, card: ModelCard
) -> None:
    assert (card.tools.arguments_as_objects, card.tools.empty_content) == (False, None)
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLS[0] | {"id": "a"}]},
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
    ]
    await client.post(CHAT, json={"model": "tiny", "messages": messages})
    assert f"Call get_weather with {W_ARGUMENTS}" in prompt_of(cluster, tokenizer)


async def test_what_openais_client_parsed_can_go_back_beside_it(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo
) -> None:
    """Its `parse` and its stream helper add what they read to the messages that people send on."""
    parsed = {"name": "now", "arguments": "{}", "parsed_arguments": {"a": [1]}}
    calling = {"id": "a", "type": "function", "function": parsed}
    answers = [
        {"role": "assistant", "content": '{"b": 2}', "parsed": {"b": 2}},
        {"role": "assistant", "content": None, "parsed": None, "tool_calls": [calling]},
    ]
    result = {"role": "tool", "tool_call_id": "a", "content": "cold"}
    messages = [USER, answers[0], USER, answers[1], result]
    response = await client.post(CHAT, json={"model": "tiny", "messages": messages})
    assert response.status_code == 200, response.text
    prompt = prompt_of(cluster, tokenizer)
    assert '{"b": 2}' in prompt and "parsed" not in prompt


@pytest.mark.parametrize(
    ("model", "says_it", "begun"),
    [
        (ToolModel(THINKING, (), "", "thinking"), "<think>\nHm 🙂.\n</think>\n\n", False),
        (ToolModel(THINKING_OPEN, (), "", "open"), "Hm 🙂.\n</think>\n\n", True),
        (
            ToolModel(THINKING, ("<think>", "</think>"), "", "control"),
            "<think>\nHm 🙂.\n</think>\n\n",
            False,
        ),
    ],
    ids=["whole", "begun in the prompt", "control tokens"],
)
async def test_reasoning(
    client: httpx.AsyncClient,
    cluster: Any,
    tokenizer: TokenizerInfo,
    says_it: str,
    begun: bool,
) -> None:
    says(cluster, tokenizer, says_it + "Yes.")
    [choice] = await both_ways(client)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm 🙂.\n", "Yes.")
    assert choice["finish_reason"] == "stop"
    says(cluster, tokenizer, says_it + MODELS["hermes"].says)
    [choice] = await both_ways(client, tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm 🙂.\n", None)
    assert message["tool_calls"] == CALLS and choice["finish_reason"] == "tool_calls"
    says(cluster, tokenizer, says_it)
    [choice] = await both_ways(client)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm 🙂.\n", "")
    for name in ("reasoning_content", "reasoning"):
        messages = [USER, {"role": "assistant", "content": "Yes.", name: "Hm."}, USER]
        await client.post(CHAT, json={"model": "tiny", "messages": messages})
        assert "<think>Hm.</think>\nYes." in prompt_of(cluster, tokenizer)


@pytest.mark.parametrize("model", [ToolModel(THINKING, (), "", "thinking")])
@pytest.mark.parametrize("parsers", [Parsers(reasoning="none", tools="none")])
async def test_what_is_switched_off_is_content(
    client: httpx.AsyncClient, cluster: Any, tokenizer: TokenizerInfo
) -> None:
    says(cluster, tokenizer, "<think>Hm.</think>Yes.")
    [choice] = await both_ways(client)
    assert choice["message"]["content"] == "<think>Hm.</think>Yes."
    response = await client.post(CHAT, json={"model": "tiny", "messages": [USER], "tools": TOOLS})
    assert response.status_code == 400
    assert "--tool-call-parser none" in response.json()["error"]["message"]


def enforced(cluster: Any) -> str:
    """What the workers keep sampling to."""
    grammar: str = cluster.requests[-1].legs[0].sampling.grammar
    return grammar


@pytest.mark.parametrize(
    ("fields", "names", "many"),
    [
        ({}, None, True),
        ({"tool_choice": "auto"}, None, True),
        ({"tool_choice": "none", "parallel_tool_calls": False}, None, True),
        ({"tool_choice": "required"}, ["get_weather", "now"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "now"], False),
        ({"parallel_tool_calls": False}, ["get_weather", "now"], False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"], False),
    ],
)
async def test_what_is_asked_of_calls_is_enforced(
    client: httpx.AsyncClient,
    cluster: Any,
    fields: dict[str, Any],
    names: list[str] | None,
    many: bool,
) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS} | fields
    assert (await client.post(CHAT, json=body)).status_code == 200
    grammar = enforced(cluster)
    if names is None:
        assert grammar == ""
        steered = {**body, "bad_words": ["{"], "min_tokens": 9, "ignore_eos": True}
        assert (await client.post(CHAT, json=steered)).status_code == 200
        return
    assert re.findall(r'name\\": \\"(\w+)', grammar) == names
    assert ("behind)*" in grammar) == many
    assert grammar.startswith("start: calls") == ("tool_choice" in fields)


async def test_strict_arguments_are_enforced_also_where_the_model_may_choose(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    body = {"model": "tiny", "messages": [USER], "tools": [strict, NOW]}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert "start: (head behind)* TEXT" in enforced(cluster)


def call(id: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}} | fields


def asks(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(id) for id in ids]}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "x"}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("model", "fields", "start"),
    [
        (MODELS["hermes"], {"tools": TOOLS}, "start: (calls | @content)"),
        (MODELS["hermes"], {"tools": TOOLS, "tool_choice": "required"}, "start: calls\n"),
        (MODELS["hermes"], {"tools": TOOLS, "tool_choice": "none"}, ""),
        (MODELS["mistral"], {"tools": TOOLS}, "start: (calls | @content)"),
        (ToolModel(THINKING_OPEN, (), "", "open"), {}, "start: thought GAP @content"),
        (ToolModel(THINKING, (), "", "open"), {}, 'start: ("<think>" thought GAP)? @content'),
    ],
    ids=["tools", "required", "none", "mistral", "thinking begun", "thinking"],
)
async def test_a_format_is_that_of_the_content(
    client: httpx.AsyncClient, cluster: Any, fields: dict[str, Any], start: str
) -> None:
    body = {"model": "tiny", "messages": [USER], "response_format": FORMAT} | fields
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    grammar = enforced(cluster)
    if grammar.startswith("{"):
        parts = json.loads(grammar)["grammars"]
        grammar = parts[0].get("lark_grammar") or ""
        assert ("@content" in grammar) == (len(parts) == 2)
    assert grammar.startswith(start) and bool(grammar) == bool(start)


@pytest.mark.parametrize("model", [MODELS["llama"], MODELS["json"]], ids=lambda m: m.name)
async def test_a_format_cannot_stand_beside_calls_without_a_mark(
    client: httpx.AsyncClient,
) -> None:
    body = {"model": "tiny", "messages": [USER], "response_format": FORMAT, "tools": TOOLS}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format")
    response = await client.post(CHAT, json=body | {"tool_choice": "required"})
    assert response.status_code == 200


async def test_a_schema_that_cannot_be_kept_is_refused_where_it_is_strict(
    client: httpx.AsyncClient,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}
    for strict, status in ((True, 400), (False, 200)):
        tools = function(parameters=schema, strict=strict)
        body = {"model": "tiny", "messages": [USER], "tools": tools, "tool_choice": "required"}
        response = await client.post(CHAT, json=body)
        assert response.status_code == status, response.text
        if status == 400:
            assert response.json()["error"]["param"] == "tools"


BAD, TYPE, UNKNOWN = "invalid_value", "invalid_type", "unsupported_parameter"
MISSING = "missing_required_parameter"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": function() * 129}, BAD, "tools"),
    ({"tools": function() * 2}, BAD, "tools[1].function.name"),
    ({"tools": function(name="")}, BAD, "tools[0].function.name"),
    ({"tools": function(name="a b")}, BAD, "tools[0].function.name"),
    ({"tools": function(name="a\n")}, BAD, "tools[0].function.name"),
    ({"tools": function(name="a" * 65)}, BAD, "tools[0].function.name"),
    ({"tools": function(name=1)}, TYPE, "tools[0].function.name"),
    ({"tools": function(parameters=[])}, TYPE, "tools[0].function.parameters"),
    ({"tools": function(parameters={"type": "array"})}, BAD, "tools[0].function.parameters"),
    ({"tools": function(parameters={"a": "x" * 70_000})}, BAD, "tools[0].function.parameters"),
    ({"tools": function(strict="yes")}, TYPE, "tools[0].function.strict"),
    ({"tools": function(color="red")}, UNKNOWN, "tools[0].function.color"),
    ({"tools": [{"type": "custom", "custom": {}}]}, BAD, "tools[0].type"),
    ({"tools": {}}, TYPE, "tools"),
    ({"tool_choice": "required"}, BAD, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, BAD, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 1}, BAD, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, MISSING, "tool_choice.type"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        BAD,
        "tool_choice.function.name",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, TYPE, "parallel_tool_calls"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 9}, BAD, "min_tokens"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, BAD, "ignore_eos"),
    ({"tools": TOOLS, "tool_choice": "required", "bad_words": ["{"]}, BAD, "bad_words"),
    ({"tools": function(strict=True), "bad_words": ["{"]}, BAD, "bad_words"),
    (
        {"tools": TOOLS, "parallel_tool_calls": False, "allowed_token_ids": [4]},
        BAD,
        "allowed_token_ids",
    ),
    ({"functions": [{"name": "f"}]}, UNKNOWN, "functions"),
    ({"messages": [USER, asks("a")]}, BAD, "messages[1].tool_calls"),
    ({"messages": [USER, asks("a", "b"), result("a")]}, BAD, "messages[1].tool_calls"),
    ({"messages": [USER, asks("a"), USER]}, BAD, "messages[1].tool_calls"),
    ({"messages": [USER, asks("a", "a")]}, BAD, "messages[1].tool_calls[1].id"),
    ({"messages": [USER, result("a")]}, BAD, "messages[1].tool_call_id"),
    (
        {"messages": [USER, asks("a"), result("a"), result("a")]},
        BAD,
        "messages[3].tool_call_id",
    ),
    (
        {"messages": [USER, {"role": "tool", "content": "x"}]},
        MISSING,
        "messages[1].tool_call_id",
    ),
    ({"messages": [USER | {"tool_calls": [call("a")]}]}, BAD, "messages[0].tool_calls"),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
        TYPE,
        "messages[1].content",
    ),
    ({"messages": [USER, {"role": "assistant"}]}, MISSING, "messages[1].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call("a", function={})]}]},
        MISSING,
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call("")]}]},
        BAD,
        "messages[0].tool_calls[0].id",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=lambda v: str(v)[:48])
async def test_what_is_wrong_is_a_400_that_names_it(
    client: httpx.AsyncClient, cluster: Any, fields: dict[str, Any], code: str, param: str
) -> None:
    response = await client.post(CHAT, json={"model": "tiny", "messages": [USER]} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert not cluster.requests


@pytest.mark.parametrize("model", [ToolModel(HERMES.replace("tools", "nothing"), (), "", "none")])
async def test_a_model_that_is_told_of_no_tools_takes_none(
    client: httpx.AsyncClient, card: ModelCard
) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "does not know tools" in response.json()["error"]["message"]
    assert (await client.post(CHAT, json=body | {"tool_choice": "none"})).status_code == 200
    assert card.tools.takes_calls


@pytest.mark.parametrize("model", [ToolModel("{{ messages[0].content }}", (), "", "plain")])
async def test_a_template_without_calls_takes_none_back(client: httpx.AsyncClient) -> None:
    messages = [USER, asks("a"), result("a")]
    response = await client.post(CHAT, json={"model": "tiny", "messages": messages})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (UNKNOWN, "messages[1].tool_calls")


def test_templates_are_tried_for_how_they_take_calls(tmp_path: Path) -> None:
    assert "c.function.arguments" in TEXT_ARGUMENTS
    for model in MODELS.values():
        folder = tmp_path / model.name
        folder.mkdir()
        tokenizer = load_tokenizer(write_model(folder, model.template, model.control))
        tools = model_card(["tiny"], tokenizer, 2000, created_s=0).tools
        assert (tools.format.name, tools.takes_calls) == (model.name, True)
        assert tools.arguments_as_objects == (model.name != "json")
