"""Two workers try their lane: over TCP, and over a transport that loses, damages or forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvrelay.shared.engine.messages import PushDone, RelayFailed
from kvrelay.shared.errors import CorruptFrame
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.transfer.loopback import Fate, LoopbackHub, LoopbackTransport, Message
from kvrelay.shared.transfer.protocol import Transport
from kvrelay.shared.transfer.tcp import TcpTransport
from kvrelay.shared.transfer.wire import (
    MAX_PROBE_BYTES,
    ProbeHeader,
    decode_frame,
    encode_probe,
)
from kvrelay.shared.types import Incarnation
from kvrelay.shared.worker.meeting import EMPTY_ROUNDS, PROBE_DEADLINE_S, Meeting
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender

PREFILL, DECODE = Incarnation("a" * 32), Incarnation("d" * 32)
POOL = bytes(range(256))


@dataclass
class Pair:
    sender: Sender
    receiver: Receiver
    prefill: PeerInfo
    decode: PeerInfo
    pool: bytearray
    """Of the decode worker."""
    said: list[object]


@asynccontextmanager
async def pair(make: Callable[[], Transport]) -> AsyncIterator[Pair]:
    ours, theirs = make(), make()
    metrics = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})
    pool, said = bytearray(POOL), list[object]()
    view = lambda first, count: memoryview(pool)  # noqa: E731
    done: Callable[[PushDone], None] = said.append
    sender = Sender(ours, PREFILL, view, done, metrics)
    receiver = Receiver(theirs, DECODE, view, said.append, metrics)
    addresses = await ours.listen(), await theirs.listen()
    try:
        async with asyncio.timeout(20):
            peers = PeerInfo(PREFILL, addresses[0]), PeerInfo(DECODE, addresses[1])
            yield Pair(sender, receiver, *peers, pool, said)
    finally:
        await sender.close()
        await receiver.close()
        await ours.close()
        await theirs.close()


async def met(workers: Pair) -> Meeting:
    found: asyncio.Future[Meeting] = asyncio.get_running_loop().create_future()
    workers.sender.meet(workers.decode, found.set_result)
    return await found


async def test_a_meeting_connects_once_measures_and_touches_no_block() -> None:
    async with pair(lambda: TcpTransport("127.0.0.1")) as workers:
        workers.receiver.meet(workers.prefill)
        first = await met(workers)
        assert first.problem == "" and first.carried_by == "tcp to 127.0.0.1"
        assert first.round_trip_ns > 0 and first.bytes_per_s > 0
        assert await met(workers) is first, "nothing is tried again over a lane that works"
        visit = await workers.sender.visit(workers.decode, MAX_PROBE_BYTES, 2)
        assert visit.problem == ""
        assert workers.pool == POOL and workers.said == []


async def test_a_visit_to_nobody_says_so_in_time_and_the_next_one_finds_it() -> None:
    async with pair(lambda: TcpTransport("127.0.0.1")) as workers:
        begun_s = asyncio.get_running_loop().time()
        silent = await met(workers)  # it listens, but not to this one
        assert silent.problem == f"no answer to a probe within {PROBE_DEADLINE_S:g} s"
        assert asyncio.get_running_loop().time() - begun_s < 2 * PROBE_DEADLINE_S
        workers.receiver.meet(workers.prefill)
        assert (await met(workers)).problem == ""


def loopback(faults: Callable[[Message], Fate]) -> Callable[[], Transport]:
    hub = LoopbackHub(faults)
    return lambda: LoopbackTransport(hub)


async def test_a_lane_that_loses_or_damages_what_it_carries_does_not_count_as_met() -> None:
    large = (MAX_PROBE_BYTES,)
    for faults, problem in (
        (Fate(copies=0), "no answer to a probe"),
        (Fate(flip_bit=12345), f"a probe of {MAX_PROBE_BYTES} bytes arrived damaged"),
    ):
        count = 0

        def fate(message: Message, faults: Fate = faults) -> Fate:
            nonlocal count
            count += len(message.data) in large
            return faults if len(message.data) in large else Fate()

        async with pair(loopback(fate)) as workers:
            workers.receiver.meet(workers.prefill)
            assert (await met(workers)).problem.startswith(problem)
            assert count == 1, f"after {EMPTY_ROUNDS} empty ones"
            assert workers.pool == POOL
            assert not any(isinstance(each, RelayFailed) for each in workers.said)


def test_a_probe_header_is_read_as_it_was_written_and_nothing_else_is() -> None:
    header = ProbeHeader(PREFILL, DECODE, 2**48 - 1, MAX_PROBE_BYTES, 2**64 - 1)
    frame = encode_probe(header)
    assert decode_frame(frame) == header
    too_large = ProbeHeader(PREFILL, DECODE, 1, MAX_PROBE_BYTES + 1, 0)
    with pytest.raises(CorruptFrame, match="a probe of"):
        decode_frame(encode_probe(too_large))
    for at in range(0, len(frame), 7):
        damaged = bytearray(frame)
        damaged[at] ^= 1
        with pytest.raises(CorruptFrame):
            decode_frame(damaged)
