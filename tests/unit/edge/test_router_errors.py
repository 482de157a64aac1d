"""Every wrong request: its status, type, code and param, the same with and without streaming."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.api import create_app
from kvrelay.shared.errors import (
    DeadlineExceeded,
    IllegalMove,
    KvrelayError,
    Overloaded,
    PeerLost,
    Unavailable,
    WorkerFailed,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD, TYPE, UNSUPPORTED = "invalid_value", "invalid_type", "unsupported_parameter"
MISSING, LONG = "missing_required_parameter", "context_length_exceeded"
USER = {"role": "user", "content": "hi"}

CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, BAD, "messages"),
    ({"messages": "hi"}, TYPE, "messages"),
    ({"messages": ["hi"]}, TYPE, "messages[0]"),
    ({"messages": [USER, {"role": "owner", "content": "x"}]}, BAD, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, MISSING, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, TYPE, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, BAD, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        BAD,
        "messages[0].content",
    ),
    ({"messages": [USER | {"tool_calls": [{}]}]}, MISSING, "messages[0].tool_calls[0].id"),
    ({"messages": [USER | {"function_call": {}}]}, UNSUPPORTED, "messages[0].function_call"),
    ({"messages": [USER | {"color": "red"}]}, UNSUPPORTED, "messages[0].color"),
    ({"messages": [USER] * 4097}, BAD, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, LONG, "messages"),
    ({"max_completion_tokens": 0}, BAD, "max_completion_tokens"),
    ({"max_completion_tokens": 201}, BAD, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, BAD, "max_tokens"),
    ({"tools": [{"type": "function"}]}, MISSING, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, UNSUPPORTED, "tools"),
    ({"tool_choice": "required"}, BAD, "tool_choice"),
    ({"functions": [{"name": "f"}]}, UNSUPPORTED, "functions"),
    ({"function_call": "auto"}, UNSUPPORTED, "function_call"),
    ({"top_logprobs": 5}, BAD, "top_logprobs"),
    ({"reasoning_effort": "high"}, UNSUPPORTED, "reasoning_effort"),
]
COMPLETION_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, TYPE, "prompt"),
    ({"prompt": ""}, BAD, "prompt"),
    ({"prompt": []}, BAD, "prompt"),
    ({"prompt": ["a", ""]}, BAD, "prompt"),
    ({"prompt": [[]]}, BAD, "prompt"),
    ({"prompt": 5}, TYPE, "prompt"),
    ({"prompt": [1, "a"]}, TYPE, "prompt"),
    ({"prompt": [1.5]}, TYPE, "prompt"),
    ({"prompt": [True]}, TYPE, "prompt"),
    ({"prompt": {"text": "a"}}, TYPE, "prompt"),
    ({"prompt": [-1]}, BAD, "prompt[0]"),
    ({"prompt": [[1], [2, 265]]}, BAD, "prompt[1]"),
    ({"prompt": [10**40]}, BAD, "prompt[0]"),
    ({"prompt": ["a"] * 100_000}, BAD, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, BAD, "n"),
    ({"prompt": "x" * 200}, LONG, "prompt"),
    ({"prompt": "x" * 1_000_000}, LONG, "prompt"),
    ({"prompt": [1] * 200}, LONG, "prompt"),
    ({"max_tokens": 0}, BAD, "max_tokens"),
    ({"max_tokens": -1}, BAD, "max_tokens"),
    ({"max_tokens": 201}, BAD, "max_tokens"),
    ({"max_tokens": 2**62}, BAD, "max_tokens"),
    ({"max_tokens": 10**400}, BAD, "max_tokens"),
    ({"max_tokens": "16"}, TYPE, "max_tokens"),
    ({"max_tokens": 16.0}, TYPE, "max_tokens"),
    ({"max_tokens": True}, TYPE, "max_tokens"),
    ({"min_tokens": 17, "max_tokens": 16}, BAD, "min_tokens"),
    ({"temperature": -0.1}, BAD, "temperature"),
    ({"temperature": 2.1}, BAD, "temperature"),
    ({"temperature": "hot"}, TYPE, "temperature"),
    ({"top_p": 0}, BAD, "top_p"),
    ({"top_p": 1.1}, BAD, "top_p"),
    ({"top_k": -2}, BAD, "top_k"),
    ({"min_p": 1.1}, BAD, "min_p"),
    ({"n": 0}, BAD, "n"),
    ({"n": 10_000}, BAD, "n"),
    ({"n": 10**7}, BAD, "n"),
    ({"seed": 2**63}, BAD, "seed"),
    ({"seed": 1.5}, TYPE, "seed"),
    ({"stop": ""}, BAD, "stop[0]"),
    ({"stop": ["a", ""]}, BAD, "stop[1]"),
    ({"stop": ["a"] * 17}, BAD, "stop"),
    ({"stop": ["a"] * 100_000}, BAD, "stop"),
    ({"stop": "x" * 1025}, BAD, "stop[0]"),
    ({"stop": 5}, TYPE, "stop"),
    ({"stop_token_ids": [265]}, BAD, "stop_token_ids[0]"),
    ({"stop_token_ids": [0, -1]}, BAD, "stop_token_ids[1]"),
    ({"stop_token_ids": [0] * 129}, BAD, "stop_token_ids"),
    ({"priority": 2**31}, BAD, "priority"),
    ({"priority": -(2**31) - 1}, BAD, "priority"),
    ({"priority": 0.5}, TYPE, "priority"),
    ({"priority": True}, TYPE, "priority"),
    ({"cache_salt": ""}, BAD, "cache_salt"),
    ({"cache_salt": "s" * 129}, BAD, "cache_salt"),
    ({"cache_salt": 5}, TYPE, "cache_salt"),
    ({"stream": "yes"}, TYPE, "stream"),
    ({"stream_options": {}, "stream": False}, BAD, "stream_options"),
    ({"stream_options": {"every": 2}, "stream": True}, UNSUPPORTED, "stream_options.every"),
    ({"suffix": "x"}, UNSUPPORTED, "suffix"),
    ({"messages": [USER]}, UNSUPPORTED, "messages"),
    ({"no_such_field": None}, UNSUPPORTED, "no_such_field"),
    ({"model": ""}, BAD, "model"),
    ({"model": 1}, TYPE, "model"),
]
NEUTRAL: list[dict[str, Any]] = [
    {"logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
    {"best_of": 1, "echo": False, "suffix": None, "response_format": {"type": "text"}},
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"stop": [], "stop_token_ids": [], "seed": None, "top_k": -1, "temperature": None},
    {"priority": None, "cache_salt": None},
]
BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"a": NaN}', "NaN is not a number"),
    (b"[]", "must be a JSON object, not a list"),
    (b"null", "must be a JSON object, not null"),
    (b'{"model": "tiny", "model": "tiny"}', "names the field 'model' twice"),
    (b"[" * 100_000, "nested too deep"),
    (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested too deep"),
    (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "may stand 100 levels deep"),
    (b'{"seed": ' + b"1" * 1_000_000 + b"}", "a number with too many digits"),
    (b'{"model": "\xff"}', "not valid Unicode text"),
    (b'{"model": "\xed\xa0\x80"}', "not valid Unicode text"),
    (rb'{"model": "tiny", "prompt": "x \ud83d y"}', "not valid Unicode text"),
    (rb'{"model": "tiny", "prompt": "x", "\udc00": 1}', "not valid Unicode text"),
    (rb'{"model": "tiny", "prompt": "x", "user": "\uD83D"}', "not valid Unicode text"),
]


def error_of(response: httpx.Response) -> tuple[int, str, str | None, str | None]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return response.status_code, error["type"], error["code"], error["param"]


CASES = [(CHAT, *case) for case in CHAT_FIELDS] + [
    (COMPLETIONS, *case) for case in COMPLETION_FIELDS
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[1])[:40])
async def test_a_wrong_field_is_a_400_that_names_it(
    client: httpx.AsyncClient,
    cluster: Any,
    case: tuple[str, dict[str, Any], str, str],
    stream: bool,
) -> None:
    path, fields, code, param = case
    body: dict[str, Any] = {"model": "tiny"} | ({"stream": True} if stream else {})
    body |= {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    response = await client.post(path, json=body | fields)
    assert error_of(response) == (400, "invalid_request_error", code, param)
    assert cluster.requests == []


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_a_required_field(client: httpx.AsyncClient, field: str) -> None:
    body = {"model": "tiny", "messages": [USER]}
    del body[field]
    response = await client.post(CHAT, json=body)
    assert error_of(response) == (400, "invalid_request_error", MISSING, field)


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
async def test_a_value_that_asks_for_nothing_is_accepted(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await client.post(COMPLETIONS, json={"model": "tiny", "prompt": "hi"} | fields)
    assert response.status_code == 200, response.text


async def test_an_answers_message_can_be_sent_back(client: httpx.AsyncClient) -> None:
    answer = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}
    body = {"model": "tiny", "messages": [USER, answer, USER]}
    assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(("body", "words"), BODIES, ids=lambda value: str(value)[:32])
async def test_a_body_that_cannot_be_read_is_a_400(
    client: httpx.AsyncClient, body: bytes, words: str
) -> None:
    response = await client.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert error_of(response) == (400, "invalid_request_error", None, None)
    assert words in response.json()["error"]["message"]


async def test_a_body_with_all_the_levels_that_it_may_have_is_read(
    client: httpx.AsyncClient,
) -> None:
    body = b'{"model": "tiny", "prompt": "hi", "a":' + b"[" * 99 + b"]" * 99 + b"}"
    kind = {"content-type": "application/json"}
    response = await client.post(COMPLETIONS, content=body, headers=kind)
    assert error_of(response) == (400, "invalid_request_error", UNSUPPORTED, "a")


async def test_a_proper_surrogate_pair_is_a_character(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    body = rb'{"model": "tiny", "prompt": "\ud83d\ude42"}'
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=body, headers=headers)).status_code == 200
    prompt = cluster.requests[0].legs[0].prompt
    assert prompt == tuple(cluster.byte_ids[bytes([byte])] for byte in "🙂".encode())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_another_content_type_is_a_400(client: httpx.AsyncClient, kind: str) -> None:
    body = b'{"model": "tiny", "prompt": "hi"}'
    response = await client.post(COMPLETIONS, content=body, headers={"content-type": kind})
    assert error_of(response) == (400, "invalid_request_error", None, None)


@pytest.mark.parametrize("name", ["gpt-9", "../../etc/passwd", "/etc/passwd", "a\x00b", "x" * 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_a_404(
    client: httpx.AsyncClient, name: str, stream: bool
) -> None:
    body = {"model": name, "prompt": "hi", "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    assert error_of(response) == (404, "invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize("name", ["gpt-9", "..%2f..%2fetc%2fpasswd", "%252e%252e", "a%00b", ""])
async def test_an_unknown_model_in_a_path_is_a_404(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/v1/models/{name}")
    assert error_of(response) == (404, "invalid_request_error", "model_not_found", "model")


async def test_a_too_long_prompt_is_told_both_lengths(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"model": "tiny", "prompt": "x" * 321})
    message = response.json()["error"]["message"]
    assert "maximum context length is 200 tokens" in message
    assert "prompt has 321 tokens" in message


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_large_body_is_a_413_before_it_is_read_to_the_end(
    client: httpx.AsyncClient, declared: bool
) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(300):
            sent += 1 << 20
            yield b" " * (1 << 20)

    length = {"content-length": str(300 << 20)} if declared else {}
    headers = {"content-type": "application/json", **length}
    response = await client.post(COMPLETIONS, content=body(), headers=headers)
    assert error_of(response) == (413, "invalid_request_error", None, None)
    assert sent == (0 if declared else 9 << 20)


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/chat", "/docs"])
async def test_an_unknown_path_is_a_404(client: httpx.AsyncClient, path: str) -> None:
    assert error_of(await client.get(path)) == (404, "invalid_request_error", None, None)


async def test_a_wrong_method_is_a_405(client: httpx.AsyncClient) -> None:
    response = await client.get(CHAT)
    assert error_of(response) == (405, "invalid_request_error", None, None)
    assert response.headers["allow"] == "POST"


FAILURES: list[tuple[KvrelayError, tuple[int, str, str, None]]] = [
    (
        Overloaded("full", retry_after_s=1.25),
        (429, "rate_limit_error", "rate_limit_exceeded", None),
    ),
    (Unavailable("no worker"), (503, "server_error", "service_unavailable", None)),
    (DeadlineExceeded("late"), (504, "server_error", "deadline_exceeded", None)),
    (WorkerFailed("10.0.0.7 died"), (500, "server_error", "internal_error", None)),
    (PeerLost("10.0.0.7 died"), (500, "server_error", "internal_error", None)),
    (IllegalMove("10.0.0.7 died"), (500, "server_error", "internal_error", None)),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_real_status(
    client: httpx.AsyncClient, cluster: Any, error: KvrelayError, expected: Any, stream: bool
) -> None:
    cluster.script = lambda request: [error]
    body = {"model": "tiny", "messages": [USER], "stream": stream}
    response = await client.post(CHAT, json=body)
    assert error_of(response) == expected
    assert "10.0.0.7" not in response.text
    assert cluster.generations[0].closes == 1


async def test_a_refusal_says_when_to_come_back(client: httpx.AsyncClient, cluster: Any) -> None:
    cluster.script = lambda request: [Overloaded("full", retry_after_s=1.25)]
    response = await client.post(CHAT, json={"model": "tiny", "messages": [USER]})
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1250"


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: type(value).__name__)
async def test_a_later_failure_is_an_event_and_the_stream_still_ends(
    client: httpx.AsyncClient, cluster: Any, error: KvrelayError, expected: Any
) -> None:
    first = TokenEvent(0, 0, cluster.byte_ids[b"x"])
    cluster.script = lambda request: [first, error]
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    token, failed, done, end = response.text.split("\n\n")
    assert json.loads(token.removeprefix("data: "))["choices"][0]["text"] == "x"
    told = json.loads(failed.removeprefix("data: "))["error"]
    assert (told["type"], told["code"], told["param"]) == expected[1:]
    assert "10.0.0.7" not in failed
    assert (done, end) == ("data: [DONE]", "")
    assert cluster.generations[0].closes == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_events_that_end_too_early_are_a_failure(
    client: httpx.AsyncClient, cluster: Any, stream: bool
) -> None:
    cluster.script = lambda request: []
    body = {"model": "tiny", "prompt": "hi", "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    assert error_of(response) == (500, "server_error", "internal_error", None)


async def test_a_defect_is_a_500_without_details(client: httpx.AsyncClient, cluster: Any) -> None:
    cluster.script = lambda request: [ZeroDivisionError("secret")]
    response = await client.post(COMPLETIONS, json={"model": "tiny", "prompt": "hi"})
    assert error_of(response) == (500, "server_error", "internal_error", None)
    assert "secret" not in response.text
    assert cluster.generations[0].closes == 1


async def test_without_a_model_there_is_a_503(cluster: Any) -> None:
    app: FastAPI = create_app(cluster, lambda: None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        response = await client.post(CHAT, json={"model": "tiny", "messages": [USER]})
        assert error_of(response) == (503, "server_error", "service_unavailable", None)
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
