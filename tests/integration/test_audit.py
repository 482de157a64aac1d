"""`kvrelay audit` over a real cluster of 2 + 2: clean when it is, and what was planted is told."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis
from tests.integration.clients import token_ids
from tests.stack import Process, Stack, metrics_at, until

from kvrelay.services.router.dispatch import worker_end
from kvrelay.services.router.links import Link, keep_library
from kvrelay.services.router.policy import NO_LOAD, LiveWorker
from kvrelay.shared.rpc.convert import leg_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import WorkerRecord
from kvrelay.shared.types import LegSpec, Role, SamplingParams

KEYS = Keys("kvrelay")
NOBODY = "f" * 32


def command(stack: Stack, *flags: str) -> list[str]:
    program = [sys.executable, "-m", "kvrelay.services.cli", "audit", "--json"]
    return [*program, "--redis", stack.redis_url, *flags]


def audit(stack: Stack, *flags: str) -> dict[str, Any]:
    """Its JSON, whose status is the exit code."""
    done = subprocess.run(command(stack, *flags), capture_output=True, text=True, timeout=60)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["status"] == done.returncode, done.stderr
    return result


def texts(result: dict[str, Any], kind: str) -> list[str]:
    return [each["what"] for each in result["findings"] if each["kind"] == kind]


@contextmanager
def planted(stack: Stack) -> Iterator[redis.Redis]:
    """A hand in Redis; all keys it left behind are removed."""
    with redis.Redis.from_url(stack.redis_url) as client:
        before = {*client.scan_iter("*")}
        try:
            yield client
        finally:
            left = [key for key in client.scan_iter("*fff*") if key not in before]
            if left:
                client.delete(*left)


def test_a_cluster_at_rest_and_one_under_load_are_clean(tcp: Stack) -> None:
    assert audit(tcp)["findings"] == []
    over = threading.Event()

    def client(number: int) -> int:
        rng, asked = random.Random(f"audit {number}"), 0
        while not over.is_set():
            prompt, tokens = token_ids(rng, rng.randint(20, 400)), rng.randint(1, 120)
            tcp.complete(prompt, max_tokens=tokens, ignore_eos=True)
            asked += 1
        return asked

    with ThreadPoolExecutor(12) as clients:
        asked = [clients.submit(client, number) for number in range(12)]
        try:
            results = [audit(tcp) for _ in range(3)]
        finally:
            over.set()
    assert [(each["status"], each["findings"]) for each in results] == [(0, [])] * 3
    looked_at = [each["looked_at"] for each in results]
    assert all((each["workers"], each["routers"]) == (4, 1) for each in looked_at)
    assert sum(each["legs"] for each in looked_at) >= 6, "it looked while they were at work"
    assert all(each.result() > 0 for each in asked)
    assert audit(tcp)["status"] == 0


def test_the_time_to_free_is_counted_by_how_a_leg_ended(tcp: Stack) -> None:
    def freed(end: str) -> float:
        page = metrics_at(f"{tcp.url}/metrics")
        return page[f'kvrelay_time_to_free_seconds_count{{end="{end}"}}']

    finished, cancelled = freed("finished"), freed("cancelled")
    prompt = token_ids(random.Random("free"), 200)
    tcp.complete(prompt, max_tokens=3, ignore_eos=True)
    until(lambda: freed("finished") == finished + 1, 2.0, "its last worker has let go")
    body = {"model": tcp.model, "prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
    with tcp.http.stream("POST", f"{tcp.url}/v1/completions", json={**body, "stream": True}) as s:
        next(s.iter_lines())
    until(lambda: freed("cancelled") == cancelled + 1, 2.0, "both have let go")


def test_records_and_keys_of_nobody_are_listed(tcp: Stack) -> None:
    with planted(tcp) as client:
        fields = {"phase": "decoding", "rank": 3, "attempt": 0, "prefill": "", "decode": ""}
        client.hset(KEYS.request(f"{NOBODY}/0"), mapping={"router": NOBODY, **fields})
        [live] = [key.decode().rpartition(":")[2] for key in client.scan_iter(KEYS.router("*"))]
        client.hset(KEYS.request(f"fff{NOBODY}/1"), mapping={"router": live, **fields})
        client.set(KEYS.request(f"ffff{NOBODY}/2"), "no record")
        client.hset(KEYS.blocks(NOBODY), mapping={"seq": 1, "at": 1, "digests": b"x" * 16})
        client.hset(KEYS.assigned(NOBODY), "1", 500)
        client.set(KEYS.worker(NOBODY), "{}")
        result = audit(tcp)
    assert result["status"] == 1
    assert {*texts(result, "ledger")} == {
        f"the record of ffff{NOBODY}/2 cannot be read",
        f"the record of leg fff{NOBODY}/1 is open (decoding): "
        f"its router {live[:12]} does not know it",
        f"the record of leg {NOBODY}/0 is open (decoding): its router {NOBODY[:12]} is gone",
    }
    assert {*texts(result, "lease")} == {
        f"{family}:{NOBODY} belongs to nobody who holds a lease, and lives for ever"
        for family in ("assigned", "blocks", "worker")
    }


def test_a_block_that_is_told_and_in_no_pool_is_listed(tcp: Stack) -> None:
    tcp.complete(token_ids(random.Random("told"), 100), max_tokens=2)
    with redis.Redis.from_url(tcp.redis_url) as client:
        assert audit(tcp)["status"] == 0, "all is told: no batch comes between"
        worker = next(client.scan_iter(KEYS.events("*"))).decode().rpartition(":")[2]

        def tell(**changes: bytes) -> None:
            fields = {"+": changes.get("added", b""), "-": changes.get("removed", b"")}
            seq = client.hincrby(KEYS.blocks(worker), "seq", 1)
            client.xadd(KEYS.events(worker), fields, id=f"{seq}-0")

        tell(added=b"\xff" * 16)
        result = audit(tcp)
        tell(removed=b"\xff" * 16)
    assert result["status"] == 1
    assert texts(result, "directory") == ["1 blocks are told that its pool does not have"]
    [finding] = result["findings"]
    assert finding["blocks"] == ["ff" * 16] and worker[:12] in finding["where"]
    assert audit(tcp)["status"] == 0


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_blocks_that_no_router_asked_for_are_listed_until_they_are_given_back(
    tcp: Stack,
) -> None:
    """By a router that is in no register, and holds its stream."""
    keep_library()
    with redis.Redis.from_url(tcp.redis_url) as client:
        kept = [client.get(key) for key in client.scan_iter(KEYS.worker("*"))]
    records = [WorkerRecord.from_json(text) for text in kept if text is not None]
    decode, prefill = (
        next(record for record in records if record.role is role)
        for role in (Role.DECODE, Role.PREFILL)
    )
    room = asyncio.Event()
    link = Link(
        decode.incarnation,
        decode.grpc_address,
        NOBODY,
        lambda _, event: room.set() if event.WhichOneof("kind") == "room" else None,
        lambda _: None,
    )
    await link.tried.wait()
    spec = LegSpec(f"{NOBODY}/0", tuple(range(3, 103)), SamplingParams(max_tokens=4))
    reserve = pb.Reserve(ref=pb.Ref(leg=spec.leg, attempt=0, nonce=0xF00), leg=leg_to_wire(spec))
    reserve.prefill.CopyFrom(worker_end(LiveWorker(prefill, NO_LOAD)).peer)
    link.send(pb.Command(reserve=reserve))
    async with asyncio.timeout(5):
        await room.wait()
    result = await asyncio.to_thread(audit, tcp)
    await link.close()
    assert result["status"] == 1
    [finding] = result["findings"]
    assert finding["kind"] == "reservation" and decode.incarnation[:12] in finding["where"]
    held = f"leg {NOBODY}/0, attempt 0 (f00) is receiving, holding 7 blocks"
    assert finding["what"] == f"{held}: its router {NOBODY[:12]} is gone"
    assert (await asyncio.to_thread(audit, tcp))["status"] == 0


@pytest.mark.leaks_allowed
def test_a_killed_worker_leaves_nothing_behind_once_its_lease_ended(tcp: Stack) -> None:
    victim = tcp.decodes[0]
    rng = random.Random("killed")
    with ThreadPoolExecutor(6) as clients:
        answers = [
            clients.submit(tcp.complete, token_ids(rng, 60), max_tokens=300, ignore_eos=True)
            for _ in range(6)
        ]
        until(lambda: any(tcp.held(worker) for worker in tcp.decodes), 10.0, "they run")
        victim.end(signal.SIGKILL)
        try:
            result = audit(tcp)
            for answer in answers:
                answer.result()
        finally:
            victim.start()
            until(tcp.all_seen, 10.0, "the router sees all workers again")
    assert (result["status"], result["findings"], result["unasked"]) == (0, [], [])


@pytest.mark.leaks_allowed
def test_a_frozen_worker_is_named_as_not_asked(tcp: Stack) -> None:
    victim = tcp.prefills[1]
    with redis.Redis.from_url(tcp.redis_url) as client:
        try:
            victim.kill(signal.SIGSTOP)
            keep_lease(client, victim)
            result = audit(tcp)
        finally:
            victim.kill(signal.SIGCONT)
    until(tcp.all_seen, 10.0, "the router sees all workers again")
    assert result["status"] == 2
    [unasked] = result["unasked"]
    assert unasked["who"].startswith(f"{victim.name} (")
    assert unasked["why"] == f"{victim.detail['address']} does not answer within 3 s"


def keep_lease(client: redis.Redis, worker: Process) -> None:
    """Its lease as if it had just been renewed: a command line starts slowly on a busy machine."""
    for key in client.scan_iter(KEYS.worker("*")):
        record = json.loads(client.get(key) or b"{}")
        if record.get("name") == worker.name:
            client.zincrby(KEYS.workers, 2000, record["incarnation"])
            client.pexpire(key, 4000)


def test_the_legs_of_a_router_are_for_who_may_read_its_record(tcp: Stack) -> None:
    with redis.Redis.from_url(tcp.redis_url) as client:
        [key] = [*client.scan_iter(KEYS.router("*"))]
        token = json.loads(client.get(key) or b"")["admin_token"]
    url = f"{tcp.url}/admin/legs"
    for headers in ({}, {"authorization": "Basic x"}, {"authorization": f"Bearer {token}x"}):
        assert httpx.get(url, headers=headers).status_code == 401
    page = httpx.get(url, headers={"authorization": f"Bearer {token}"})
    assert (page.status_code, page.json()["legs"]) == (200, [])


def test_a_router_that_does_not_say_where_it_is_can_be_named(tcp: Stack) -> None:
    with tcp.behind("everywhere", host="0.0.0.0") as other:
        alone = audit(tcp)
        port = other.router.detail["address"].rpartition(":")[2]
        named = audit(tcp, "--router", f"http://127.0.0.1:{port}")
    assert alone["status"] == 2
    assert alone["unasked"][0]["why"] == "it listens on all addresses: name one with --router"
    assert (named["status"], named["looked_at"]["routers"]) == (0, 2)
