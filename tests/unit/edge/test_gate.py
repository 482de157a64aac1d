"""Who may come in: API keys, web pages, places."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.unit.edge.test_router_errors import error_of

from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.gate import GateRules, Places
from kvrelay.services.router.openai.api import Pages, create_app
from kvrelay.services.router.openai.generate import EdgeSettings
from kvrelay.shared.errors import ConfigError, Overloaded
from kvrelay.shared.types import ValidRequest

PAGE = "https://app.example.org"
HELLO = {"model": "tiny", "prompt": "hi"}


@asynccontextmanager
async def asking(cluster: Any, card: Any, rules: GateRules) -> AsyncIterator[httpx.AsyncClient]:
    settings = EdgeSettings(gate=rules)
    app: FastAPI = create_app(cluster, lambda: card, settings, pages=Pages(lambda: b"up 1\n"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
        yield http


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"authorization": "bearer  two "},
        {"x-api-key": "two"},
        {"authorization": "Bearer", "x-api-key": "one"},
    ],
    ids=str,
)
async def test_any_of_the_keys_opens_every_route(
    cluster: Any, card: Any, headers: dict[str, str]
) -> None:
    async with asking(cluster, card, GateRules(ApiKeys(["one", "two"]))) as client:
        for path in ("/v1/models", "/metrics", "/version", "/load", "/tokenizer_info"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=headers)).status_code == 200
        assert (await client.post("/v1/completions", json=HELLO)).status_code == 401
        answer = await client.post("/v1/completions", json=HELLO, headers=headers)
        assert answer.status_code == 200


async def test_probes_need_no_key_and_nothing_else_does_without_one(
    cluster: Any, card: Any
) -> None:
    async with asking(cluster, card, GateRules(ApiKeys(["one"]))) as client:
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        document = (await client.get("/openapi.json", headers={"x-api-key": "one"})).json()
        for path, operations in document["paths"].items():
            for method in operations:
                found = await client.request(method, path.replace("{name}", "tiny"))
                assert (found.status_code == 401) == (path not in ("/health", "/ready")), path


async def test_without_keys_everybody_may_ask(cluster: Any, card: Any) -> None:
    async with asking(cluster, card, GateRules()) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert "security" not in (await client.get("/openapi.json")).text


async def test_a_refusal_says_how_and_not_what(cluster: Any, card: Any) -> None:
    async with asking(cluster, card, GateRules(ApiKeys(["sk-right"]))) as client:
        without = await client.get("/v1/models", headers={"x-request-id": "job-7"})
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer sk-wrong"})
    for response in (without, wrong):
        assert error_of(response) == (401, "invalid_request_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "sk-" not in response.text
    assert without.headers["x-request-id"] == "job-7"
    assert wrong.headers["x-request-id"]


def test_keys_of_a_file_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\nfirst\n\n  second  \n")
    keys = ApiKeys(["given"], str(file))
    assert [keys.admits(key) for key in ("given", "first", "second")] == [True] * 3
    assert [keys.admits(key) for key in ("", "# the team's", "third")] == [False] * 3
    file.write_text("third\n")
    keys.reload()
    assert [keys.admits(key) for key in ("given", "first", "third")] == [True, False, True]


@pytest.mark.parametrize("content", ["", "# none\n", "has space\n", "\xe9\n"])
def test_a_file_that_went_bad_changes_nothing(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    keys = ApiKeys(file=str(file))
    file.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.INFO):
        keys.reload()
    assert keys.admits("first") and "stay as they were" in caplog.text
    with pytest.raises(ConfigError, match="api-key-file"):
        ApiKeys(file=str(file))


def test_a_bad_key_is_named_by_its_place_only(tmp_path: Path) -> None:
    for bad in ("", "with space", "ümlaut", "x" * 513):
        with pytest.raises(ConfigError, match="key 2 must be") as caught:
            ApiKeys(["fine", bad])
        assert not bad or bad not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys(file=str(tmp_path / "none"))


# ---- web pages -----------------------------------------------------------------------------------


async def test_a_page_that_is_allowed_may_call_and_read(cluster: Any, card: Any) -> None:
    rules = GateRules(ApiKeys(["one"]), origins=frozenset({PAGE}))
    preflight = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with asking(cluster, card, rules) as client:
        told = await client.options("/v1/completions", headers=preflight)
        asked = await client.post(
            "/v1/completions", json=HELLO, headers={"origin": PAGE, "x-api-key": "one"}
        )
        refused = await client.get("/v1/models", headers={"origin": PAGE})
    assert told.status_code == 204
    assert told.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in told.headers["access-control-allow-methods"]
    assert (asked.status_code, refused.status_code) == (200, 401)
    for response in (told, asked, refused):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["vary"] == "origin"
    assert "x-request-id" in asked.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("origins", "told"), [((), False), ((PAGE,), True)])
async def test_any_other_page_is_not_named(
    cluster: Any, card: Any, origins: tuple[str, ...], told: bool
) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with asking(cluster, card, GateRules(origins=frozenset(origins))) as client:
        for response in (
            await client.options("/v1/completions", headers=headers),
            await client.get("/v1/models", headers=headers),
        ):
            assert "access-control-allow-origin" not in response.headers
            assert ("vary" in response.headers) == told
        assert (await client.options("/v1/completions", headers=headers)).status_code == 405


async def test_all_pages_may_be_allowed(cluster: Any, card: Any) -> None:
    async with asking(cluster, card, GateRules(origins=frozenset({"*"}))) as client:
        response = await client.get("/v1/models", headers={"origin": "https://any.example"})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-origin" not in (await client.get("/v1/models")).headers


# ---- places --------------------------------------------------------------------------------------


async def test_beyond_the_places_there_is_a_429_and_probes_still_pass(
    cluster: Any, card: Any
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    end = cluster.saying("x")

    def script(request: ValidRequest) -> Any:
        reached.set()
        return [gate, *end(request)]

    cluster.script = script
    async with asking(cluster, card, GateRules(max_requests=1)) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=HELLO))
        await reached.wait()
        for path in ("/v1/models", "/load"):
            response = await client.get(path)
            assert error_of(response) == (429, "rate_limit_error", "rate_limit_exceeded", None)
            assert int(response.headers["retry-after-ms"]) >= 1
        assert (await client.get("/health")).status_code == 200
        gate.set()
        assert (await first).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0, "queued": 0}


async def test_a_place_is_given_back_whatever_happens(cluster: Any, card: Any) -> None:
    cluster.script = lambda request: [ZeroDivisionError("a defect")]
    async with asking(cluster, card, GateRules(max_requests=1)) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=HELLO)).status_code == 500
        assert (await client.get("/v1/models")).status_code == 200


def test_how_soon_a_place_gets_free_follows_from_those_that_did() -> None:
    now = 0
    places = Places(1, lambda: now)
    places.take()
    with pytest.raises(Overloaded) as guess:
        places.take()
    assert guess.value.retry_after_s == 1.0  # nobody has left yet
    for _ in range(3):
        now += 2 * 10**9
        places.give_back()
        places.take()
    with pytest.raises(Overloaded) as known:
        places.take()
    assert known.value.retry_after_s == pytest.approx(4 / 3)
    now += 30 * 10**9
    with pytest.raises(Overloaded) as stuck:
        places.take()
    assert stuck.value.retry_after_s == 30.0
