"""`kvrelay doctor` and a cluster of real processes: well, with a misfit, with a frozen worker."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.stack import Stack, running, until

from kvrelay.services.doctor.cluster import look_at_cluster
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.types import Role

pytestmark = pytest.mark.leaks_allowed  # a worker is started beside the others


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("doctor")
    with running(folder / "stack", tiny_model, kv_cache_memory_bytes=32 << 20, threads=1) as up:
        yield up


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "kvrelay.services.cli", "doctor", *flags]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


def test_a_healthy_cluster(stack: Stack) -> None:
    before = stack.baseline()
    done = doctor("--redis", stack.redis_url, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    cluster = report["cluster"]
    assert {each["name"] for each in cluster["workers"]} == {each.name for each in stack.workers}
    [router], [pair] = cluster["routers"], cluster["pairs"]
    assert router["address"] == stack.router.detail["address"]
    assert pair["problem"] == "" and pair["mb_per_s"] > 0 and pair["round_trip_ms"] > 0
    assert pair["carried_by"], "what really carries the bytes"
    assert abs(pair["clock_offset_ms"]) < 1_000  # one machine, one clock
    assert before and stack.baseline(), "no block is touched"
    table = doctor("--redis", stack.redis_url)
    assert table.returncode == 0
    assert "nothing is wrong" in table.stdout and pair["carried_by"] in table.stdout


def test_who_did_not_find_the_redis_that_was_named_says_so() -> None:
    done = doctor("--redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 2
    assert "wrong redis: Redis at 127.0.0.1:1: Connection refused" in done.stdout


def test_a_worker_of_another_block_size_is_named_by_that_field(stack: Stack) -> None:
    misfit = stack.make_worker(Role.DECODE, 9, block_size=32)
    misfit.start()
    try:
        done = doctor("--redis", stack.redis_url)
    finally:
        misfit.end()
    assert done.returncode == 1
    assert "wrong decode-9: is paired with nobody" in done.stdout
    assert "block_size: 32 against 16" in done.stdout


def test_a_frozen_worker_is_named_while_its_lease_holds_and_missed_after_it(stack: Stack) -> None:
    decode = stack.decodes[0]
    decode.kill(signal.SIGSTOP)
    try:
        seen = asyncio.run(look_at_cluster(stack.redis_url, "kvrelay"))
        done = doctor("--redis", stack.redis_url)
    finally:
        decode.kill(signal.SIGCONT)
    problems = {worker.name: worker.problem for worker in seen.workers}
    assert problems["prefill-0"] == "" and problems[decode.name].startswith("does not answer")
    assert done.returncode == 1
    until(lambda: stack.all_seen() and stack.ready(), 10, "it is back")


def test_a_probe_is_bounded_and_alone(stack: Stack) -> None:
    async def ask() -> tuple[set[grpc.StatusCode], int]:
        async with grpc.aio.insecure_channel(str(stack.prefills[0].detail["address"])) as channel:
            stub = relay_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            nobody = pb.Peer(incarnation="0" * 32, scheme="none", address=b"")
            codes = set()
            for body_bytes, rounds in ((2 << 20, 1), (1, 1_000), (0, 1)):
                request = pb.ProbeRequest(decode=nobody, body_bytes=body_bytes, rounds=rounds)
                try:
                    await stub.Probe(request)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
            request = pb.ProbeRequest(decode=nobody, body_bytes=1, rounds=1)
            reply = await stub.Probe(request)
            assert "cannot be reached" in reply.lane.problem
            seen = await look_at_cluster(stack.redis_url, "kvrelay")
            [real] = [pair for pair in seen.pairs if not pair.problem]
            assert real.mb_per_s > 0, "who asked for nonsense has spoilt nothing"
            many = [stub.Probe(to_decode(stack)) for _ in range(8)]
            answers = await asyncio.gather(*many, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
            return codes | {each.code() for each in refused}, len(answers) - len(refused)

    codes, answered = asyncio.run(ask())
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert answered >= 1


def to_decode(stack: Stack) -> pb.ProbeRequest:
    import redis

    from kvrelay.shared.store.census import take_census
    from kvrelay.shared.store.keys import Keys

    with redis.Redis.from_url(stack.redis_url) as client:
        census = take_census(client, Keys("kvrelay"))
    [decode] = [each.record for each in census.workers if each.record.role is Role.DECODE]
    peer = pb.Peer(
        incarnation=decode.incarnation,
        scheme=decode.transfer_scheme,
        address=decode.transfer_address,
    )
    return pb.ProbeRequest(decode=peer, body_bytes=1 << 20, rounds=16)
