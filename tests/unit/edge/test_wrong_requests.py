"""A table of wrong requests over all routes: what each is answered, exactly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import pytest
from tests.unit.edge.test_router_errors import error_of

from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.gate import GateRules
from kvrelay.services.router.openai.api import Pages, create_app
from kvrelay.services.router.openai.exchange import BodyLimits
from kvrelay.services.router.openai.generate import EdgeSettings
from kvrelay.shared.errors import DeadlineExceeded, Overloaded, Unavailable, WorkerFailed

KEY = "sk-right"
CHAT, TEXT, TOKENIZE, DETOKENIZE = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/tokenize", "/detokenize"),
)
INVALID, LIMITED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
BAD, TYPE, UNSUPPORTED = "invalid_value", "invalid_type", "unsupported_parameter"
MISSING, LONG, NO_MODEL = (
    *("missing_required_parameter", "context_length_exceeded"),
    "model_not_found",
)
HI = [{"role": "user", "content": "hi"}]
WELL: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    TEXT: {"model": "tiny", "prompt": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [1, 2]},
}
"""A right body for each route; a row's fields replace some of its."""


class Row(NamedTuple):
    path: str
    fields: Any = None
    """Replace those of the right body; None among them takes one out, bytes are the whole body."""
    status: int = 400
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    method: str = "POST"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    fails: Exception | None = None
    """What the cluster answers."""


def wrong(path: str, code: str | None, param: str | None, **fields: Any) -> Row:
    return Row(path, fields, 400, INVALID, code, param)


def route(method: str, path: str, status: int, code: str | None = None) -> Row:
    param = "model" if code == NO_MODEL else None
    return Row(path, None, status, INVALID, code, param, method)


def unauthorized(method: str, path: str, **headers: str) -> Row:
    return Row(
        path, {}, 401, INVALID, "invalid_api_key", None, method, {"authorization": "", **headers}
    )


TABLE = [
    # Fields of the generating routes.
    wrong(CHAT, MISSING, "model", model=...),
    wrong(CHAT, MISSING, "messages", messages=...),
    wrong(CHAT, BAD, "messages", messages=[]),
    wrong(CHAT, BAD, "messages[0].role", messages=[{"role": "owner", "content": "x"}]),
    wrong(CHAT, TYPE, "messages[0].content", messages=[{"role": "user", "content": 5}]),
    wrong(
        CHAT, BAD, "messages[0].content", messages=[{"role": "user", "content": [{"type": "x"}]}]
    ),
    wrong(CHAT, UNSUPPORTED, "messages[0].color", messages=[{**HI[0], "color": "red"}]),
    wrong(CHAT, LONG, "messages", messages=[{"role": "user", "content": "x" * 200}]),
    wrong(CHAT, UNSUPPORTED, "no_such_field", no_such_field=1),
    wrong(CHAT, UNSUPPORTED, "prompt", prompt="hi"),
    wrong(CHAT, BAD, "max_completion_tokens", max_completion_tokens=0),
    wrong(CHAT, BAD, "max_completion_tokens", max_completion_tokens=101),
    wrong(CHAT, BAD, "max_tokens", max_completion_tokens=5, max_tokens=6),
    wrong(CHAT, UNSUPPORTED, "modalities", modalities=["audio"]),
    wrong(CHAT, UNSUPPORTED, "guided_backend", guided_backend="x"),
    wrong(TEXT, MISSING, "prompt", prompt=...),
    wrong(TEXT, BAD, "prompt", prompt=""),
    wrong(TEXT, TYPE, "prompt", prompt={"text": "hi"}),
    wrong(TEXT, BAD, "prompt[0]", prompt=[-1]),
    wrong(TEXT, BAD, "prompt[1]", prompt=[[1], [2, 265]]),
    wrong(TEXT, LONG, "prompt", prompt="x" * 200),
    wrong(TEXT, BAD, "n", prompt=["a"] * 65, n=2),
    wrong(TEXT, BAD, "max_tokens", max_tokens=101),
    wrong(TEXT, BAD, "max_tokens", max_tokens=-1),
    wrong(TEXT, TYPE, "max_tokens", max_tokens="16"),
    wrong(TEXT, BAD, "temperature", temperature=2.5),
    wrong(TEXT, BAD, "top_p", top_p=0),
    wrong(TEXT, BAD, "seed", seed=2**63),
    wrong(TEXT, BAD, "stop", stop=["a"] * 17),
    wrong(TEXT, BAD, "stop[0]", stop=""),
    wrong(TEXT, BAD, "stop_token_ids[0]", stop_token_ids=[265]),
    wrong(TEXT, BAD, "stream_options", stream_options={}),
    wrong(TEXT, TYPE, "stream", stream="yes"),
    wrong(TEXT, BAD, "cache_salt", cache_salt=""),
    # Fields of the routes about tokens.
    wrong(TOKENIZE, MISSING, "prompt", prompt=...),
    wrong(TOKENIZE, TYPE, "prompt", prompt=["a", "b"]),
    wrong(TOKENIZE, BAD, "prompt", prompt="x" * ((1 << 20) + 1)),
    wrong(TOKENIZE, TYPE, "add_special_tokens", add_special_tokens="no"),
    wrong(TOKENIZE, UNSUPPORTED, "color", color="red"),
    wrong(TOKENIZE, BAD, "messages[0].role", prompt=..., messages=[{"role": "x", "content": "y"}]),
    wrong(
        TOKENIZE,
        UNSUPPORTED,
        "add_special_tokens",
        prompt=...,
        messages=HI,
        add_special_tokens=True,
    ),
    wrong(TOKENIZE, UNSUPPORTED, "messages", messages=HI),
    wrong(DETOKENIZE, MISSING, "tokens", tokens=...),
    wrong(DETOKENIZE, TYPE, "tokens", tokens="1"),
    wrong(DETOKENIZE, TYPE, "tokens[1]", tokens=[1, "2"]),
    wrong(DETOKENIZE, BAD, "tokens[2]", tokens=[1, 2, 265]),
    wrong(DETOKENIZE, BAD, "tokens[0]", tokens=[-1]),
    # Bodies and heads.
    Row(CHAT, b"{"),
    Row(TOKENIZE, b'["hi"]'),
    Row(DETOKENIZE, b'{"tokens": [1], "tokens": [2]}'),
    Row(TEXT, b"x" * 3_000_000, 413),
    Row(TOKENIZE, {}, headers={"content-type": "text/plain"}),
    # Models, paths, methods.
    *(Row(path, {"model": "gpt-9"}, 404, INVALID, NO_MODEL, "model") for path in WELL),
    route("GET", "/v1/models/gpt-9", 404, NO_MODEL),
    route("GET", "/v1/models/..%2f..%2fetc", 404, NO_MODEL),
    *(
        route("GET", path, 404)
        for path in ("/", "/v1", "/v1/embeddings", "/admin/legs", "/v1//models")
    ),
    *(
        route("POST", path, 404)
        for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions/")
    ),
    *(route("GET", path, 405) for path in WELL),
    *(
        route("POST", path, 405)
        for path in ("/v1/models", "/health", "/metrics", "/version", "/load")
    ),
    route("DELETE", "/v1/models/tiny", 405),
    # Keys.
    *(unauthorized("POST", path) for path in WELL),
    unauthorized("POST", CHAT, authorization="Bearer sk-wrong"),
    unauthorized("POST", CHAT, authorization=f"Basic {KEY}"),
    unauthorized("POST", TEXT, authorization=KEY),
    unauthorized("POST", TEXT, **{"x-api-key": "sk-wrong"}),
    *(
        unauthorized("GET", path)
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/version")
    ),
    *(
        unauthorized("GET", path)
        for path in ("/load", "/tokenizer_info", "/openapi.json", "/nowhere")
    ),
    *(
        unauthorized("GET", path)
        for path in ("//health", "/health/", "/health%2f..%2fload", "/Health")
    ),
    # Failures of what is behind.
    Row(TEXT, {}, 429, LIMITED, "rate_limit_exceeded", fails=Overloaded("full", retry_after_s=1.0)),
    Row(CHAT, {}, 503, SERVER, "service_unavailable", fails=Unavailable("no worker")),
    Row(CHAT, {}, 504, SERVER, "deadline_exceeded", fails=DeadlineExceeded("late")),
    Row(TEXT, {}, 500, SERVER, "internal_error", fails=WorkerFailed("a worker died")),
    Row(TEXT, {}, 500, SERVER, "internal_error", fails=ZeroDivisionError("a defect")),
]


@pytest.fixture
async def guarded(cluster: Any, card: Any) -> AsyncIterator[httpx.AsyncClient]:
    """With a key, a limit on output and a small one on bodies."""
    card = replace(card, max_output_tokens=100)
    gate = GateRules(ApiKeys([KEY]))
    settings = EdgeSettings(body=BodyLimits(bytes=2 << 20), gate=gate)
    app = create_app(cluster, lambda: card, settings, pages=Pages(lambda: b""))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://edge", headers=headers
    ) as http:
        yield http


def body_of(row: Row) -> bytes | None:
    if row.fields is None or row.method != "POST":
        return None
    if isinstance(row.fields, bytes):
        return row.fields
    fields = WELL.get(row.path, {}) | row.fields
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


def test_there_are_enough_of_them() -> None:
    assert len(TABLE) >= 60


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.method} {row.path} {row.param}"[:60])
async def test_a_wrong_request(guarded: httpx.AsyncClient, cluster: Any, row: Row) -> None:
    if row.fails is not None:
        cluster.script = lambda request: [row.fails]
    response = await guarded.request(
        row.method, row.path, content=body_of(row), headers=row.headers
    )
    assert error_of(response) == (row.status, row.type, row.code, row.param)
    assert len(cluster.requests) == (row.fails is not None)
