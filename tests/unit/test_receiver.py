"""Both halves of the relay when a message begins and never ends, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest
from tests.sim.virtual import run_virtual

from kvrelay.shared.engine.messages import (
    ChunkArrived,
    Expect,
    Forgotten,
    Push,
    PushDone,
    RelayFailed,
)
from kvrelay.shared.errors import PeerLost
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.transfer.protocol import Address, Buffer, Peer
from kvrelay.shared.transfer.wire import ChunkHeader, encode_header
from kvrelay.shared.types import BlockId, Incarnation, LegRef
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.receiver import BODY_DEADLINE_S, FORGET_GRACE_S, Receiver
from kvrelay.shared.worker.sender import Sender

BLOCK_BYTES = 64
REF = LegRef("0" * 32 + "/0", 1, 7)
PREFILL, DECODE = Incarnation("a" * 32), Incarnation("d" * 32)
WRITER = PeerInfo(PREFILL, Address("loopback", b"1"))
HEADER = ChunkHeader(REF, PREFILL, DECODE, 0, 0, 16, (1,), BLOCK_BYTES, 0)
Reports = asyncio.Queue[ChunkArrived | RelayFailed | Forgotten]


@dataclass
class StuckPeer:
    alive: bool = True
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class StuckTransport:
    """Brings one header, and of its body the beginning.

    As the protocol says, a receive in the middle of its message ends with that or with its peer: a
    caller who is cancelled waits for one of them.
    """

    def __init__(self, *, sends: bool = False) -> None:
        self.headers = [encode_header(HEADER)]
        self.begun = asyncio.Event()
        self.connections = 0
        self._sends = sends

    async def listen(self) -> Address:
        return Address("loopback", b"0")

    async def start_over(self) -> Address:
        raise AssertionError("it goes on")

    async def connect(self, to: Address) -> Peer:
        self.connections += 1
        return StuckPeer()

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        assert self._sends, "nothing is sent here"
        assert isinstance(peer, StuckPeer)
        self.begun.set()
        await peer.closed.wait()
        raise PeerLost("the peer was closed")

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        assert isinstance(peer, StuckPeer)
        if not peer.alive:
            raise PeerLost("the peer is gone")
        if self.headers and memoryview(buffer).nbytes == len(self.headers[0]):
            memoryview(buffer)[:] = self.headers.pop()
            return
        self.begun.set()
        ended = asyncio.ensure_future(peer.closed.wait())
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                await asyncio.wait((ended,))
                raise
        raise PeerLost("the peer was closed")

    async def close_peer(self, peer: Peer) -> None:
        assert isinstance(peer, StuckPeer)
        peer.alive = False
        peer.closed.set()

    async def close(self) -> None:
        pass

    @property
    def kept_bytes(self) -> int:
        return 0

    def purge(self, first_tag: int, last_tag: int) -> None:
        pass

    def carried_by(self, peer: Peer) -> str:
        return "stuck"

    def describe(self) -> str:
        return "stuck"


def receiving(
    scene: Callable[[Receiver, StuckTransport, Reports], Coroutine[None, None, None]],
) -> float:
    """Run `scene` beside a receiver whose chunk has begun; the virtual seconds it took."""

    async def run() -> float:
        transport, reports = StuckTransport(), Reports()
        pool = memoryview(bytearray(8 * BLOCK_BYTES))
        metrics = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})

        def view(first: int, count: int) -> memoryview:
            return pool[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]

        receiver = Receiver(transport, DECODE, view, reports.put_nowait, metrics)
        receiver.expect(
            Expect(REF, PREFILL, 0, 33, 16, (BlockId(3), BlockId(4), BlockId(5))), WRITER
        )
        await transport.begun.wait()
        begun_s = asyncio.get_running_loop().time()
        await scene(receiver, transport, reports)
        took_s = asyncio.get_running_loop().time() - begun_s
        await receiver.close()
        return took_s

    return run_virtual(run)


def test_closing_waits_for_no_message_that_has_begun() -> None:
    async def scene(receiver: Receiver, transport: StuckTransport, reports: Reports) -> None:
        await receiver.close()
        assert reports.get_nowait() == RelayFailed(REF, "the worker is stopping")

    assert receiving(scene) == 0.0


def test_a_body_that_stops_in_the_middle_fails_its_attempt_soon() -> None:
    async def scene(receiver: Receiver, transport: StuckTransport, reports: Reports) -> None:
        assert await reports.get() == RelayFailed(REF, "the body of chunk 0 does not come")

    assert receiving(scene) <= BODY_DEADLINE_S + FORGET_GRACE_S


def test_forgetting_waits_no_longer_than_its_grace() -> None:
    async def scene(receiver: Receiver, transport: StuckTransport, reports: Reports) -> None:
        receiver.forget(REF)
        assert await reports.get() == Forgotten(REF)

    assert receiving(scene) <= FORGET_GRACE_S


@pytest.mark.parametrize("forgotten_first", [True, False])
def test_nobody_waits_for_a_writer_that_is_gone(forgotten_first: bool) -> None:
    async def scene(receiver: Receiver, transport: StuckTransport, reports: Reports) -> None:
        if forgotten_first:
            receiver.forget(REF)
        receiver.lose(PREFILL)
        if not forgotten_first:
            assert await reports.get() == RelayFailed(REF, "the peer was closed")
            receiver.forget(REF)
        assert await reports.get() == Forgotten(REF)

    assert receiving(scene) == 0.0


def test_all_chunks_for_a_reader_that_is_gone_are_answered_at_once() -> None:
    """The one in flight, those that wait, and the next goes over a new connection."""

    async def run() -> float:
        answers: asyncio.Queue[PushDone] = asyncio.Queue()
        transport = StuckTransport(sends=True)
        metrics = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})
        pool = memoryview(bytearray(BLOCK_BYTES))
        sender = Sender(transport, PREFILL, lambda *_: pool, answers.put_nowait, metrics)
        pushes = [
            Push(REF, chunk, chunk * 16, chunk * 16 + 16, (BlockId(0),), (1,), False)
            for chunk in range(3)
        ]
        reader = PeerInfo(DECODE, Address("loopback", b"2"))
        for push in pushes[:2]:
            sender.push(push, reader)
        await transport.begun.wait()
        begun_s = asyncio.get_running_loop().time()
        sender.lose(DECODE)
        sender.lose("e" * 32)
        found = [await answers.get() for _ in range(2)]
        assert {answer.error for answer in found} == {"the peer was closed", "the reader is gone"}
        took_s = asyncio.get_running_loop().time() - begun_s
        transport.begun.clear()
        sender.push(pushes[2], reader)
        await transport.begun.wait()
        assert transport.connections == 2
        await sender.close()
        return took_s

    assert run_virtual(run) == 0.0
