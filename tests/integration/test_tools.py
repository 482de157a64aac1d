"""Calls that must be made are made, as their schemas say, whoever draws their tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.integration.clients import events
from tests.stack import Stack

CHAT = "/v1/chat/completions"
KINDS = ["été", "冬", "🍂"]
SEASON: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "season",
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"enum": KINDS},
                "year": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["kind"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "season"}}


def ask(stack: Stack, **fields: Any) -> dict[str, Any]:
    """The choice, streamed or not; without the ids of its calls."""
    body = {"model": stack.model, "messages": [{"role": "user", "content": "Which?"}]}
    body |= {"tools": [SEASON, NOW], "max_tokens": 600, **fields}
    if not fields.get("stream"):
        response = stack.post(CHAT, **body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        content = choice["message"]["content"]
    else:
        with stack.http.stream("POST", f"{stack.url}{CHAT}", json=body) as stream:
            assert stream.status_code == 200, stream.read()
            pieces = [event["choices"][0] for event in events(stream.iter_lines())]
        choice = pieces[-1]
        content, calls = None, []
        for delta in (piece["delta"] for piece in pieces):
            content = (content or "") + delta["content"] if delta.get("content") else content
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"calls": called, "content": content, "finish": choice["finish_reason"]}


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        given = json.loads(arguments)
        if name == "now":
            assert given == {}
        else:
            assert name == "season" and given["kind"] in KINDS
            assert given.keys() <= {"kind", "year"} and 0 <= given.get("year", 0) <= 99


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_the_same_call_split_or_not_streamed_or_not(
    split: Stack, unsplit: Stack, choice: Any, temperature: float
) -> None:
    for seed in range(4):
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        fields["temperature"] = temperature
        answer = ask(split, **fields)
        assert (len(answer["calls"]), answer["finish"]) == (1, "tool_calls"), answer
        assert answer["content"] is None
        assert choice == "required" or answer["calls"][0][0] == "season"
        check(answer["calls"])
        assert ask(split, stream=True, **fields) == answer == ask(unsplit, **fields)


def test_the_results_of_a_call_are_answered(split: Stack) -> None:
    """As an agent goes on: the call, as it was told, and its result stand in the next prompt."""
    body: dict[str, Any] = {"tools": [SEASON, NOW], "max_tokens": 5, "seed": 1}
    user = {"role": "user", "content": "Which?"}
    first = {**body, "max_tokens": 600, "tool_choice": NAMED, "messages": [user]}
    message = split.post(CHAT, model=split.model, **first).json()["choices"][0]["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "yes"}
    response = split.post(CHAT, model=split.model, messages=[user, message, result], **body)
    assert response.status_code == 200, response.text


def test_a_schema_that_cannot_be_kept_is_refused_and_nobody_notices(split: Stack) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    user = {"role": "user", "content": "Which?"}
    response = split.post(
        CHAT, model=split.model, messages=[user], tools=tools, tool_choice="required"
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert ask(split, max_tokens=3)["finish"] in ("stop", "length")
