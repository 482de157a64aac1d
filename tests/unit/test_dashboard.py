"""The dashboard's page and its JSON: bounded, of the right types, without anybody's texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.router.dashboard.cluster import (
    MOST_PAIRS,
    MOST_WORKERS,
    ClusterFacts,
    cluster_page,
)
from kvrelay.services.router.dashboard.requests import MOST_ATTRIBUTES, MOST_SPANS, MOST_TEXT
from kvrelay.services.router.dashboard.routes import (
    FILES,
    MOST_REQUESTS,
    OPEN_PATHS,
    REQUESTS,
    Shown,
    dashboard_routes,
)
from kvrelay.services.router.edge import edge_settings
from kvrelay.services.router.gate import Gate, Places
from kvrelay.services.router.lately import Handed, Lately
from kvrelay.services.router.membership import SeenWorker
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.telemetry.spans import RequestRecord, SpanRecord
from kvrelay.shared.types import Incarnation, Role

KEY = "open-sesame"
MS, NOW_NS = 10**6, 10**13
FINGERPRINT = dict.fromkeys(FINGERPRINT_FIELDS, "x") | {"layout": "30x3x64", "dtype": "bfloat16"}


def worker(role: Role, number: int = 0, load: LoadRecord | None = None) -> SeenWorker:
    record = WorkerRecord(
        incarnation=Incarnation(f"{role}{number}"),
        role=role,
        name=f"{role}-{number}",
        model="m",
        grpc_address="a:1",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"",
        fingerprint=FINGERPRINT,
        block_size=16,
        pool_blocks=100,
        max_model_len=1024,
        max_num_seqs=8,
    )
    load = load or LoadRecord(2, 500, 3, 60, 100, 1000.0, 50.0, cached_blocks=20)
    return SeenWorker(record, load, live=True, late=False)


def facts(**changed: Any) -> ClusterFacts:
    workers = [worker(Role.DECODE), worker(Role.PREFILL)]
    plain = ClusterFacts(
        model="tiny",
        version="1",
        missing="",
        serves=True,
        store_up=True,
        port=8000,
        in_flight=3,
        queued=1,
        minute=Lately().look(NOW_NS),
        workers=workers,
        draining=frozenset(),
        pairs={("prefill0", "decode0"): Handed(2, 300), ("gone", "decode0"): Handed(9, 9)},
    )
    return replace(plain, **changed)


def record(number: int, **changed: Any) -> RequestRecord:
    begun = NOW_NS - number * MS
    plain = RequestRecord(
        id=f"r{number}",
        trace_id="f" * 32,
        endpoint="chat",
        model="tiny",
        received_s=1.75e9,
        received_ns=begun,
        outcome="ok",
        route="split",
        prompt_tokens=40,
        cached_tokens=16,
        output_tokens=8,
        attempts=1,
        ttft_s=0.05,
        duration_s=0.2,
        spans=(
            SpanRecord("chat tiny", "router", begun, begun + 200 * MS, None, {}),
            SpanRecord("prefill", "prefill-0", begun + 5 * MS, begun + 45 * MS, 0, {}),
            SpanRecord("decode", "decode-0", begun + 45 * MS, None, 0, {}),
        ),
        why="split: sooner there",
    )
    return replace(plain, **changed)


class Flown:
    """Records as a recorder would give them."""

    def __init__(self, *records: RequestRecord) -> None:
        self.records = [*records]

    def recent(self, limit: int) -> list[RequestRecord]:
        return self.records[:limit]

    def find(self, id: str) -> RequestRecord | None:
        return next((each for each in self.records if each.id == id), None)


@pytest.fixture
def flown() -> Flown:
    return Flown(*(record(number) for number in range(1200)))


@pytest.fixture
async def http(flown: Flown) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=dashboard_routes(Shown(facts, flown, lambda: NOW_NS)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def got(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(f"/dashboard/api/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- the page ------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page makes a browser fetch, and what its policy would not let it do."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [found[k] or "" for k in ("src", "href") if k in found and tag != "a"]
        self.inline += [name for name in found if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in found) else []


async def test_the_page_fetches_nothing_but_its_own_files(http: httpx.AsyncClient) -> None:
    page = await http.get("/dashboard")
    links = Links()
    links.feed(page.text)
    assert links.inline == []
    fetched = {link for link in links.fetched if not link.startswith("data:")}
    assert fetched <= OPEN_PATHS and fetched
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("name", FILES)
async def test_its_files_are_served_and_known_by_their_tag(
    http: httpx.AsyncClient, name: str
) -> None:
    first = await http.get(f"/dashboard{name}")
    assert (first.status_code, first.headers["content-type"]) == (200, FILES[name][1])
    again = await http.get(f"/dashboard{name}", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    outside = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s'\"`]+", first.text)
    assert outside == []
    assert "innerHTML" not in first.text and "insertAdjacentHTML" not in first.text


async def test_the_page_is_open_and_what_it_shows_wants_the_key(flown: Flown) -> None:
    settings = edge_settings(RouterConfig(model="m"), ApiKeys((KEY,)))
    settings.grammars.close()
    inner = Starlette(routes=dashboard_routes(Shown(facts, flown, lambda: NOW_NS)))
    app = Gate(inner, settings.gate, Places(10, lambda: NOW_NS), lambda: "id")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        assert {(await http.get(path)).status_code for path in OPEN_PATHS} == {200}
        for path in ("cluster", "requests", "requests/r1"):
            address = f"/dashboard/api/{path}"
            assert (await http.get(address)).status_code == 401
            known = await http.get(address, headers={"authorization": f"Bearer {KEY}"})
            assert known.status_code == 200


# ---- the cluster ---------------------------------------------------------------------------------


async def test_the_four_numbers_of_a_pool_agree(http: httpx.AsyncClient) -> None:
    page = await got(http, "cluster")
    assert [each["name"] for each in page["workers"]] == ["prefill-0", "decode-0"]
    for each in page["workers"]:
        blocks = each["blocks"]
        assert blocks == {"total": 100, "free": 40, "cached": 20, "in_use": 40, "tokens": 16}
        assert (each["running"], each["waiting"], each["waiting_tokens"]) == (3, 2, 500)


async def test_pairs_are_of_workers_that_are_there_with_their_bytes(
    http: httpx.AsyncClient,
) -> None:
    [pair] = (await got(http, "cluster"))["pairs"]
    each = 30 * 2 * 3 * 64 * 2
    assert pair == {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "prompts": 2,
        "tokens": 300,
        "bytes": 300 * each,
    }


def test_a_worker_that_says_nothing_of_its_memory_has_no_bytes() -> None:
    odd = [worker(Role.PREFILL), worker(Role.DECODE)]
    odd[1] = replace(odd[1], record=replace(odd[1].record, fingerprint={"layout": "?"}))
    [pair] = cluster_page(facts(workers=odd))["pairs"]  # type: ignore[misc]
    assert pair["bytes"] is None


@pytest.mark.parametrize(
    ("changed", "draining", "state"),
    [
        ({}, (), "ready"),
        ({"late": True}, (), "late"),
        ({}, ("decode0",), "draining"),
        ({"live": False}, ("decode0",), "not in use"),
    ],
)
def test_the_state_of_a_worker(
    changed: Mapping[str, Any], draining: tuple[str, ...], state: str
) -> None:
    seen = replace(worker(Role.DECODE), **changed)
    page: Any = cluster_page(facts(workers=[seen], draining=frozenset(draining)))
    assert page["workers"][0]["state"] == state


def test_a_large_cluster_is_cut_and_says_so() -> None:
    workers = [worker(Role.PREFILL, n) for n in range(300)] + [worker(Role.DECODE)]
    pairs = {(f"prefill{n}", "decode0"): Handed(1, 10) for n in range(300)}
    page: Any = cluster_page(facts(workers=workers, pairs=pairs))
    assert (len(page["workers"]), page["workers_left_out"]) == (MOST_WORKERS, 301 - MOST_WORKERS)
    assert (len(page["pairs"]), page["pairs_left_out"]) == (MOST_PAIRS, 300 - MOST_PAIRS)
    assert len(json.dumps(page)) < 256 << 10


async def test_what_has_not_changed_is_not_sent_again(http: httpx.AsyncClient) -> None:
    path = "/dashboard/api/cluster?requests=50"
    first = await http.get(path)
    assert len(first.json()["requests"]) == 50
    assert len(first.content) < 32 << 10, "one poll is small"
    again = await http.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


# ---- requests ------------------------------------------------------------------------------------


async def test_the_newest_come_first_and_no_more_than_asked_for(http: httpx.AsyncClient) -> None:
    shown = (await got(http, "requests?limit=7"))["requests"]
    assert [each["id"] for each in shown] == [f"r{n}" for n in range(7)]
    assert len((await got(http, "requests"))["requests"]) == REQUESTS
    most = (await got(http, f"requests?limit={MOST_REQUESTS}"))["requests"]
    assert len(most) == MOST_REQUESTS


@pytest.mark.parametrize("limit", ["0", "201", "-1", "1e2", "", "9" * 400, "\u0663"])
@pytest.mark.parametrize("path", ["requests?limit", "cluster?requests"])
async def test_a_limit_out_of_bounds_is_named(
    http: httpx.AsyncClient, path: str, limit: str
) -> None:
    answer = await http.get(f"/dashboard/api/{path}={limit}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == path.partition("?")[2]
    assert "1 to 200" in error["message"] and len(error["message"]) < 200


async def test_one_request_with_its_spans_in_ms_from_its_beginning(
    http: httpx.AsyncClient,
) -> None:
    found = await got(http, "requests/r3")
    assert (found["ttft_ms"], found["duration_ms"], found["outcome"]) == (50, 200, "ok")
    assert found["why"] == "split: sooner there"
    assert [(s["part"], s["start_ms"], s["end_ms"], s["parent"]) for s in found["spans"]] == [
        ("router", 0, 200, None),
        ("prefill-0", 5, 45, 0),
        ("decode-0", 45, None, 0),
    ]


async def test_who_is_not_known_is_a_404(http: httpx.AsyncClient) -> None:
    answer = await http.get("/dashboard/api/requests/nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("id: no request")


async def test_one_in_flight_lasts_until_now(http: httpx.AsyncClient, flown: Flown) -> None:
    flown.records.insert(0, record(250, id="new", outcome=None, ttft_s=None, duration_s=None))
    found = await got(http, "requests/new")
    assert (found["outcome"], found["ttft_ms"], found["duration_ms"]) == (None, None, 250)


async def test_a_record_of_any_size_is_shown_in_bounds(
    http: httpx.AsyncClient, flown: Flown
) -> None:
    many = {f"kvrelay.a{n}": "v" * 5000 for n in range(500)}
    span = SpanRecord("n" * 5000, "p" * 5000, NOW_NS, None, 0, many)
    spans = tuple(replace(span, parent=n - 1 if n else None) for n in range(3000))
    flown.records.insert(0, record(1, id="large", spans=spans, why="w" * 10**6))
    found = await got(http, "requests/large")
    assert (len(found["spans"]), found["spans_left_out"]) == (MOST_SPANS, 3000 - MOST_SPANS)
    assert all(len(s["name"]) == len(s["part"]) == MOST_TEXT for s in found["spans"])
    assert all(len(s["attributes"]) == MOST_ATTRIBUTES for s in found["spans"])
    assert all(s["parent"] is None or s["parent"] < MOST_SPANS for s in found["spans"])
    assert len(found["why"]) <= 4000


async def test_no_texts_of_clients_and_no_number_that_json_lacks(
    http: httpx.AsyncClient, flown: Flown
) -> None:
    attributes = {
        "gen_ai.input.messages": "SECRET",
        "gen_ai.output.messages": "SECRET",
        "gen_ai.system_instructions": "SECRET",
        "kvrelay.prompt": "SECRET",
        "user.text": "SECRET",
        "kvrelay.rate": math.nan,
        "kvrelay.blocks": 4,
        "kvrelay.odd": "\ud800<b>",
    }
    span = SpanRecord("decode", "decode-0", NOW_NS, None, None, attributes)
    flown.records.insert(0, record(1, id="private", spans=(span,)))
    answer = await http.get("/dashboard/api/requests/private")
    assert "SECRET" not in answer.text
    [shown] = answer.json()["spans"]
    assert shown["attributes"] == {"kvrelay.rate": None, "kvrelay.blocks": 4, "kvrelay.odd": "?<b>"}
