"""`--lenient-fields`: what is left out with a warning, and what is refused all the same."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.unit.edge.test_router_errors import error_of

from kvrelay.services.router.openai import lenient
from kvrelay.services.router.openai.api import create_app
from kvrelay.services.router.openai.generate import EdgeSettings

HI = {"role": "user", "content": "hi"}


@pytest.fixture
async def kind(
    cluster: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(lenient, "_warned", set())
    app = create_app(cluster, lambda: card, EdgeSettings(lenient_fields=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
        yield http


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [HI], **fields}
    return await client.post("/v1/chat/completions", json=body)


async def test_an_unknown_field_is_left_out_with_one_warning(
    kind: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            message = {**HI, "colour": "MARKER"}
            response = await chat(kind, vllm_xargs={"a": "MARKER"}, messages=[message])
            assert response.status_code == 200, response.text
    assert [record.getMessage() for record in caplog.records] == [
        "a request's field vllm_xargs is not known and was left out",
        "a request's field messages[].colour is not known and was left out",
    ]


@pytest.mark.parametrize(
    "field",
    [
        *(
            "guided_whitespace_pattern",
            "regex",
            "structural_tag",
            "json_schema",
            "ebnf",
            "stop_regex",
        ),
        *("functions", "allowed_words", "max_new_tokens", "custom_logit_processor", "prompt"),
    ],
)
async def test_a_constraint_is_never_left_out(kind: httpx.AsyncClient, field: str) -> None:
    response = await chat(kind, **{field: "x"})
    assert error_of(response) == (400, "invalid_request_error", "unsupported_parameter", field)


async def test_a_known_field_is_checked_as_ever(kind: httpx.AsyncClient) -> None:
    assert error_of(await chat(kind, temperature=3))[3] == "temperature"


async def test_names_are_neither_many_nor_long(
    kind: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {f"x{number}\n{'y' * 200}": 1 for number in range(300)}
    with caplog.at_level(logging.WARNING):
        assert (await chat(kind, **fields)).status_code == 200
    assert len(caplog.records) == 256
    assert all(len(r.getMessage()) < 150 and "\n" not in r.getMessage() for r in caplog.records)


async def test_without_it_the_same_is_refused(client: httpx.AsyncClient) -> None:
    response = await chat(client, vllm_xargs={"a": 1})
    assert error_of(response)[2:] == ("unsupported_parameter", "vllm_xargs")
