"""Messages that no receive will ever be posted for: kept up to a bound, and not for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from tests.sim.virtual import run_virtual

from kvrelay.shared.engine.messages import ChunkArrived, Expect, Forgotten, RelayFailed
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.transfer.loopback import Fate, LoopbackHub, LoopbackTransport, Message
from kvrelay.shared.transfer.protocol import Peer
from kvrelay.shared.transfer.wire import (
    HEADER_BYTES,
    ChunkHeader,
    FirstToken,
    body_tag,
    checksum,
    encode_header,
    header_tag,
)
from kvrelay.shared.types import BlockId, Incarnation, LegRef
from kvrelay.shared.worker.leftovers import LINGER_S
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.receiver import Receiver

BLOCK_BYTES = 64
PREFILL, DECODE = Incarnation("a" * 32), Incarnation("d" * 32)
Reports = asyncio.Queue[ChunkArrived | RelayFailed | Forgotten]


class Relay:
    """A prefill's end that says what it likes, and a receiver with 8 blocks."""

    def __init__(self) -> None:
        self.damage: Callable[[Message], Fate] = lambda message: Fate()
        self.hub = LoopbackHub(lambda message: self.damage(message))
        self.near = LoopbackTransport(self.hub)
        self.far = LoopbackTransport(self.hub)
        self.reports = Reports()
        pool = memoryview(bytearray(8 * BLOCK_BYTES))
        self.receiver = Receiver(
            self.near,
            DECODE,
            lambda first, count: pool[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES],
            self.reports.put_nowait,
            WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {}),
        )

    async def start(self) -> None:
        self.writer = PeerInfo(PREFILL, await self.far.listen())
        self.peer: Peer = await self.far.connect(await self.near.listen())

    def expect(self, nonce: int) -> LegRef:
        ref = LegRef("0" * 32 + f"/{nonce}", 1, nonce)
        blocks = (BlockId(1), BlockId(2), BlockId(5))
        self.receiver.expect(Expect(ref, PREFILL, 0, 40, 16, blocks), self.writer)
        return ref

    async def chunk(self, ref: LegRef, *, last: bool = True) -> None:
        """Three blocks, in two pieces; without `last` the first of them alone."""
        pieces = (2, 1) if last else (1,)
        bodies = [bytes([number]) * BLOCK_BYTES * count for number, count in enumerate(pieces)]
        header = ChunkHeader(
            ref,
            PREFILL,
            DECODE,
            0,
            0,
            40 if last else 16,
            pieces,
            sum(map(len, bodies)),
            checksum(bodies),
            FirstToken(7, 0) if last else None,
        )
        await self.far.send(self.peer, header_tag(PREFILL), encode_header(header))
        for body in bodies:
            await self.far.send(self.peer, body_tag(ref.nonce, 0), body)

    async def close(self) -> None:
        await self.receiver.close()
        await self.near.close()
        await self.far.close()
        await self.hub.close()


def relaying(scene: Callable[[Relay], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        relay = Relay()
        await relay.start()
        await scene(relay)
        await relay.close()

    run_virtual(run)


def nth(number: int, fate: Fate) -> Callable[[Message], Fate]:
    """Of the messages from now on, this one fares so."""
    count = -1

    def decide(message: Message) -> Fate:
        nonlocal count
        count += 1
        return fate if count == number else Fate()

    return decide


def is_header(message: Message) -> bool:
    return len(message.data) == HEADER_BYTES


def test_the_body_of_a_damaged_header_goes_with_its_attempt() -> None:
    async def scene(relay: Relay) -> None:
        first = relay.expect(1)
        relay.damage = nth(0, Fate(flip_bit=100))
        await relay.chunk(first)
        second = relay.expect(2)
        await relay.chunk(second)
        assert await relay.reports.get() == ChunkArrived(second, 0, 40, True, 7)
        assert relay.near.kept_bytes == 3 * BLOCK_BYTES  # nobody knows yet whose they are
        relay.receiver.forget(first)
        await asyncio.sleep(LINGER_S + 0.1)
        assert relay.near.kept_bytes == 0

    relaying(scene)


def test_pieces_behind_one_that_is_cut_short_are_taken_at_once() -> None:
    async def scene(relay: Relay) -> None:
        ref = relay.expect(1)
        relay.damage = nth(1, Fate(keep_bytes=5))
        await relay.chunk(ref)
        report = await relay.reports.get()
        assert isinstance(report, RelayFailed) and "5 of 128 bytes" in report.error
        assert relay.near.kept_bytes == 0

    relaying(scene)


@pytest.mark.parametrize("number", [1, 2])
def test_a_body_that_comes_twice_goes_with_its_attempt(number: int) -> None:
    async def scene(relay: Relay) -> None:
        ref = relay.expect(1)
        relay.damage = nth(number, Fate(copies=2))
        await relay.chunk(ref)
        await relay.reports.get()
        await asyncio.sleep(LINGER_S + 0.1)
        assert relay.near.kept_bytes == 0

    relaying(scene)


def test_what_comes_late_and_twice_is_gone_after_the_linger_too() -> None:
    async def scene(relay: Relay) -> None:
        ref = relay.expect(1)
        await relay.chunk(ref)
        await relay.reports.get()
        await relay.far.send(relay.peer, body_tag(ref.nonce, 0), bytes(BLOCK_BYTES))
        await asyncio.sleep(0.1)
        assert relay.near.kept_bytes == BLOCK_BYTES
        await asyncio.sleep(LINGER_S)
        assert relay.near.kept_bytes == 0

    relaying(scene)


def test_a_stale_chunk_whose_header_waits_keeps_its_body_until_it_is_read() -> None:
    """Cut off from its header it would stall the lane, and with it everybody else's chunks."""

    async def scene(relay: Relay) -> None:
        first, second = relay.expect(1), relay.expect(2)
        relay.damage = lambda message: Fate(delay_s=0.0 if is_header(message) else 0.5)
        await relay.chunk(first, last=False)
        relay.receiver.forget(second)
        await relay.chunk(second, last=False)
        await relay.chunk(relay.expect(3))
        assert await relay.reports.get() == Forgotten(second)
        assert await relay.reports.get() == ChunkArrived(first, 0, 16, False)
        third = await relay.reports.get()
        assert isinstance(third, ChunkArrived) and third.ref.nonce == 3
        assert relay.near.kept_bytes == 0

    relaying(scene)


def test_what_a_lost_peer_brought_is_dropped_with_it() -> None:
    async def scene(relay: Relay) -> None:
        await relay.far.send(relay.peer, body_tag(1, 0), bytes(100))
        await asyncio.sleep(0.1)
        assert relay.near.kept_bytes == 100
        await relay.near.close_peer(await relay.near.connect(relay.writer.address))
        assert relay.near.kept_bytes == 0

    relaying(scene)
