"""Requests that are nearly right, made from a number, and what every answer must be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from starlette.types import ASGIApp

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.errors import DeadlineExceeded, Overloaded, Unavailable
from kvrelay.shared.types import FinishReason, Logprobs, ValidRequest

HANGS_S = 20.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "hi"}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "tiny", "messages": [HI]}),
    (CHAT, {"model": "tiny", "messages": [HI], "stream": True, "max_completion_tokens": 9}),
    (
        CHAT,
        {
            "model": "org/tiny",
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
                HI,
                {"role": "assistant", "content": "yes", "refusal": None},
                {**HI, "name": "me"},
            ],
            "n": 2,
            "stop": ["a", "lo"],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (TEXT, {"model": "tiny", "prompt": "hi"}),
    (TEXT, {"model": "tiny", "prompt": [[1, 2], [3]], "n": 2, "max_tokens": 5, "seed": 1}),
    (
        TEXT,
        {
            "model": "tiny",
            "prompt": ["hi", "hello"],
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "stop_token_ids": [7],
            "min_tokens": 1,
            "ignore_eos": True,
            "priority": -1,
            "cache_salt": "s",
            "user": "me",
            "metadata": {"a": "b"},
        },
    ),
    (
        CHAT,
        {
            "model": "tiny",
            "messages": [HI, {"role": "assistant", "content": "well"}],
            "logprobs": True,
            "top_logprobs": 3,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (
        TEXT,
        {
            "model": "tiny",
            "prompt": "hi",
            "echo": True,
            "logprobs": 2,
            "best_of": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1.5},
            "allowed_token_ids": [1, 2, 3],
            "bad_words": ["x"],
            "truncate_prompt_tokens": 5,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "stop": "o",
        },
    ),
    ("/tokenize", {"prompt": "hello world", "return_token_strs": True}),
    ("/tokenize", {"messages": [HI], "model": "tiny"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
PATHS = ["/v1/models", "/v1/models/tiny", "/v1/models/..%2f", "/load", "/version", "/health"]
NAMES = [
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "best_of", "suffix", "logit_bias"),
    *("presence_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "tools"),
    *("tool_choice", "response_format", "structured_outputs", "truncate_prompt_tokens", "n"),
    *("max_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("return_token_ids", "skip_special_tokens", "include_stop_str_in_output", "guided_json"),
    *("stream", "stream_options", "prompt", "messages", "tokens", "no_such_field", "", "a\x00b"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 16, 200, 264, 265, 2**31, 2**63, -(2**63), 10**30),
    *(0.0, 0.5, -0.5, 1.0, 1e308, 5e-324, "", "x", "tiny", "auto", "required", "none", "\x00"),
    *("\ufdd0\ufdd2", "🙂" * 50, "<|im_end|>", "x" * 300, [], [[]], {}, [None], [1, "a"], [1.5]),
    *(["a"], ["a"] * 20, [1, 2], [[1], [2]], {"a": 1}, {"1": 5}, {"type": "text"}, [HI], HI),
    *({"type": "json_object"}, {"include_usage": True}, [{"type": "text", "text": "x"}]),
    *([{"type": "function", "function": {"name": "f", "parameters": {}}}], {"json": {"a": 1}}),
]
BYTES = [
    b"",
    b"{",
    b"null",
    b"\xff",
    b'{"a":' * 200,
    b"[" * 5000,
    b'{"model": 1e999}',
    b'"\\ud83d"',
]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, known by its number."""

    number: int
    method: str
    path: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    @staticmethod
    def of(number: int) -> Asked:
        draw = random.Random(number)
        kind = b"application/json"
        if draw.random() < 0.05:
            return Asked(number, "GET", draw.choice(PATHS), b"", ())
        path, right = draw.choice(RIGHT)
        fields = json.loads(json.dumps(right))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
            fields = _changed(fields, draw)
        body = json.dumps(fields).encode()
        luck = draw.random()
        if luck < 0.05:
            body = draw.choice(BYTES)
        elif luck < 0.1:
            at = draw.randrange(len(body))
            body = (
                body[:at] + draw.choice((b"", draw.randbytes(3))) + body[at + draw.randrange(4) :]
            )
        elif luck < 0.12:
            kind = draw.choice((b"text/plain", b"", b"application/json; charset=utf-8", b"\xff"))
        label = draw.choice((b"", b"job-1", b"\xff\x00", b"x" * 300))
        return Asked(
            number, "POST", path, body, ((b"content-type", kind), (b"x-request-id", label))
        )


def _changed(value: Any, draw: random.Random) -> Any:
    """One thing in it is another, or gone, or new."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        fields = dict(value)
        luck = draw.random()
        name = draw.choice([*fields])
        if luck < 0.15:
            del fields[name]
        elif luck < 0.45:
            fields[draw.choice(NAMES)] = draw.choice(VALUES)
        elif luck < 0.7:
            fields[name] = draw.choice(VALUES)
        else:
            fields[name] = _changed(fields[name], draw)
        return fields
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(value[at], draw), *value[at + draw.randrange(2) :]]
    return draw.choice(VALUES)


def script(cluster: Any, draw: random.Random) -> Callable[[ValidRequest], Sequence[Any]]:
    """An answer of what was asked for; now and then a failure, at once or later."""

    def events(request: ValidRequest) -> Sequence[Any]:
        failure = draw.choice(
            (Overloaded("full", retry_after_s=0.5), Unavailable("none"), DeadlineExceeded("late"))
        )
        luck = draw.random()
        if luck < 0.1:
            return [failure]
        told: list[Any] = []
        for leg, spec in enumerate(request.legs):
            for index in range(min(8, max(1, spec.sampling.max_tokens))):
                last = index == min(8, max(1, spec.sampling.max_tokens)) - 1
                token = draw.randrange(262)
                first = request.legs[leg - spec.choice]
                told.append(_event(leg, index, token, last, spec, first))
        if luck < 0.2:
            return [*told[: len(told) // 2], DeadlineExceeded("late")]
        return told

    return events


def _event(leg: int, index: int, token: int, last: bool, spec: Any, first: Any) -> TokenEvent:
    finish = FinishReason.LENGTH if last else None
    wanted, prompt = spec.sampling.logprobs, first.sampling.prompt_logprobs
    one = Logprobs(-0.5, 1, tuple((id, -0.5 - id) for id in range(max(wanted or 0, prompt or 0))))
    of_prompt = () if index or prompt is None else (one,) * (len(spec.prompt) - 1)
    return TokenEvent(leg, index, token, finish, None if wanted is None else one, of_prompt)


class Judge:
    """Holds every answer against the server's own OpenAPI document."""

    def __init__(self, app: ASGIApp, document: dict[str, Any]) -> None:
        self._app = app
        self._document = document
        self._checks: dict[str, Any] = {}
        self.statuses: dict[int, int] = {}

    async def ask(self, asked: Asked) -> int:
        """The status. Raises `AssertionError` for an answer that the document does not tell."""
        status, headers, body = await asyncio.wait_for(_sent(self._app, asked), HANGS_S)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        where = f"request {asked.number}: {asked.method} {asked.path} {asked.body[:300]!r}"
        assert status != 500, f"{where} -> 500 {body[:300]!r}"
        told = self._operation(asked)["responses"]
        assert str(status) in told, f"{where} -> {status}, which is not documented"
        kind = headers[b"content-type"].decode().partition(";")[0]
        content = told[str(status)]["content"]
        assert kind in content, f"{where} -> {kind}, which is not documented"
        if kind == "text/event-stream":
            self._stream(body, content[kind]["x-event"]["$ref"], where)
        else:
            self._check(content[kind]["schema"].get("$ref"), json.loads(body), where)
        return status

    def _operation(self, asked: Asked) -> Any:
        path = "/v1/models/{name}" if asked.path.startswith("/v1/models/") else asked.path
        return self._document["paths"][path][asked.method.lower()]

    def _stream(self, body: bytes, schema: str, where: str) -> None:
        *events, done, end = body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", ""), where
        for event in events:
            told = json.loads(event.removeprefix("data: "))
            error = "#/components/schemas/Error"
            self._check(error if "error" in told else schema, told, where)

    def _check(self, ref: str | None, value: Any, where: str) -> None:
        if ref is None:
            return
        check = self._checks.get(ref)
        if check is None:
            whole = {"$ref": ref, "components": self._document["components"]}
            check = self._checks[ref] = jsonschema_rs.validator_for(whole)
        error = next(iter(check.iter_errors(value)), None)
        assert error is None, f"{where} -> {value!r}: {error}"


async def _sent(app: ASGIApp, asked: Asked) -> tuple[int, dict[bytes, bytes], bytes]:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": asked.method,
        "path": asked.path.replace("%2f", "/"),
        "raw_path": asked.path.encode(),
        "query_string": b"",
        "headers": asked.headers,
        "root_path": "",
        "scheme": "http",
    }
    body = [{"type": "http.request", "body": asked.body, "more_body": False}]
    left = asyncio.Event()
    sent: list[Any] = []

    async def receive() -> Any:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *pieces = sent
    whole = b"".join(piece.get("body", b"") for piece in pieces)
    return start["status"], dict(start["headers"]), whole
