"""Decode's half of the relay: one lane per prefill peer, chunks straight into quarantined blocks.

The lane of a peer always has one receive posted, for the next header. A header names its attempt;
if that attempt is expected here, from this writer, in this range, its body is received into its
blocks, and otherwise into a sink. So nothing of a cancelled or stale attempt can touch memory that
has another owner, and nothing that comes late is left in the way of what follows it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrelay.shared.engine.messages import ChunkArrived, Expect, Forgotten, RelayFailed
from kvrelay.shared.errors import CorruptFrame, TransferError
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.telemetry.labels import Direction, TransferFault
from kvrelay.shared.telemetry.metrics import WorkerMetrics
from kvrelay.shared.transfer.protocol import Peer, Transport
from kvrelay.shared.transfer.wire import (
    HEADER_BYTES,
    ChunkHeader,
    ProbeHeader,
    body_tag,
    checksum,
    decode_frame,
    header_tag,
)
from kvrelay.shared.types import LegRef
from kvrelay.shared.worker.leftovers import Leftovers
from kvrelay.shared.worker.meeting import answer_probe
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.sender import BlockView

log = logging.getLogger(__name__)

Report = Callable[[ChunkArrived | RelayFailed | Forgotten], None]

BODY_DEADLINE_S = 2.0
"""Between a header and the end of its body; then its attempt has failed."""
IDLE_LANE_S = 120.0
"""Without an attempt for this long a lane may be dropped."""
FORGET_GRACE_S = 0.5
"""What a body in flight still gets once nobody wants it, before its peer is dropped."""


@dataclass(slots=True)
class Landing:
    """Where one attempt's chunks go."""

    expect: Expect
    next_token: int
    """Where the next chunk begins."""
    writing: bool = False
    """A body is being received into the blocks."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self.writing = True
        self.idle.clear()

    def finish(self) -> None:
        self.writing = False
        self.idle.set()


class Receiver:
    """All calls on the transport's event loop. `report` takes what happened."""

    def __init__(
        self,
        transport: Transport,
        incarnation: str,
        view: BlockView,
        report: Report,
        metrics: WorkerMetrics,
    ) -> None:
        self._transport = transport
        self._incarnation = incarnation
        self._view = view
        self._block_bytes = view(0, 1).nbytes
        self._report = report
        self._metrics = metrics
        self._landings: dict[int, Landing] = {}
        self._tasks = TaskSet()
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._peers: dict[str, Peer] = {}
        self._used_s: dict[str, float] = {}
        """When each lane was last expected to carry something, in the loop's time."""
        self._sink = bytearray()
        self._reading: set[str] = set()
        """Writers whose chunk is being received."""
        self._leftovers = Leftovers(transport, self._reading.__contains__)

    @property
    def expected(self) -> list[LegRef]:
        """Attempts that chunks are accepted of."""
        return [landing.expect.ref for landing in self._landings.values()]

    @property
    def kept_bytes(self) -> int:
        """Of messages that nothing waits for."""
        return self._transport.kept_bytes

    @property
    def lanes(self) -> int:
        return sum(not lane.done() for lane in self._lanes.values())

    def expect(self, expect: Expect, writer: PeerInfo) -> None:
        """Accept chunks of this attempt from this writer."""
        self._landings[expect.ref.nonce] = Landing(expect, expect.first_missing)
        self.meet(writer)

    def meet(self, writer: PeerInfo) -> None:
        """Listen to this writer. Idempotent."""
        lane = self._lanes.get(writer.incarnation)
        if lane is None or lane.done():
            self._drop_idle_lanes()
            self._lanes[writer.incarnation] = self._tasks.spawn(self._run(writer))
        self._used_s[writer.incarnation] = asyncio.get_running_loop().time()

    def _drop_idle_lanes(self) -> None:
        """A worker that was replaced never says so: its lane goes when a newcomer's is made.

        One that is still there gets a new lane with its next `expect`, before it sends anything.
        """
        horizon_s = asyncio.get_running_loop().time() - IDLE_LANE_S
        busy = {landing.expect.writer for landing in self._landings.values()}
        for writer in [*self._lanes]:
            if writer not in busy and self._used_s[writer] < horizon_s:
                self._lanes.pop(writer).cancel()
                del self._used_s[writer]

    def forget(self, ref: LegRef) -> None:
        """Accept no more; `Forgotten` follows when nothing writes into the blocks any more."""
        landing = self._landings.pop(ref.nonce, None)
        if landing is not None:
            self._leftovers.over(landing.expect.writer, ref.nonce)
        if landing is None or not landing.writing:
            self._report(Forgotten(ref))
            return
        self._tasks.spawn(self._forget(ref, landing))

    def lose(self, writer: str) -> None:
        """It is gone, dead or frozen: what it was in the middle of will not come."""
        if writer in self._peers:
            self._tasks.spawn(self._drop(writer))
        elif writer in self._lanes:
            self._lanes[writer].cancel()  # it is still connecting

    async def close(self) -> None:
        """Peers first: a message that has begun is let go of by its peer's end alone."""
        for writer in [*self._peers]:
            await self._drop(writer)
        await self._tasks.cancel()
        self._leftovers.close()

    async def _forget(self, ref: LegRef, landing: Landing) -> None:
        try:
            async with asyncio.timeout(FORGET_GRACE_S):
                await landing.idle.wait()
        except TimeoutError:
            await self._drop(landing.expect.writer)
            await landing.idle.wait()
        self._report(Forgotten(ref))

    async def _drop(self, writer: str) -> None:
        if (peer := self._peers.pop(writer, None)) is not None:
            await self._transport.close_peer(peer)

    async def _run(self, writer: PeerInfo) -> None:
        """One lane, until its peer is lost: then every attempt that waits for it fails."""
        problem = "the worker is stopping"
        try:
            peer = await self._transport.connect(writer.address)
            self._peers[writer.incarnation] = peer
            while True:
                await self._next(peer, writer)
        except TransferError as error:
            problem = str(error)
            self._metrics.transfer_failed(TransferFault.PEER_LOST)
            log.warning("relay from %s: %s", writer.incarnation, problem)
        finally:
            await self._drop(writer.incarnation)
            for landing in [*self._landings.values()]:
                if landing.expect.writer == writer.incarnation:
                    self._report(RelayFailed(landing.expect.ref, problem))

    async def _next(self, peer: Peer, writer: PeerInfo) -> None:
        """One chunk. What a damaged header meant is unknown: its attempt ends by a deadline, or by
        the hole that its next chunk shows."""
        frame = bytearray(HEADER_BYTES)
        try:
            await self._transport.recv(peer, header_tag(writer.incarnation), memoryview(frame))
            header = decode_frame(frame)
        except CorruptFrame as error:
            self._metrics.transfer_failed(TransferFault.CORRUPT)
            log.warning("a chunk from %s is dropped: %s", writer.incarnation, error)
            return
        if isinstance(header, ProbeHeader):
            await self._probed(peer, header, writer)
            return
        self._reading.add(writer.incarnation)
        try:
            await self._chunk(peer, header, writer)
        finally:
            self._reading.discard(writer.incarnation)

    async def _probed(self, peer: Peer, header: ProbeHeader, writer: PeerInfo) -> None:
        if (header.sender, header.receiver) != (writer.incarnation, self._incarnation):
            self._metrics.transfer_failed(TransferFault.REFUSED)
            return
        try:
            with self._cut_later(writer.incarnation):
                async with asyncio.timeout(BODY_DEADLINE_S):
                    await answer_probe(self._transport, peer, header)
        except (CorruptFrame, TimeoutError) as error:
            log.warning("a probe from %s: %s", writer.incarnation, str(error) or "it stopped")

    async def _chunk(self, peer: Peer, header: ChunkHeader, writer: PeerInfo) -> None:
        """Receive the body of one chunk, wherever it belongs."""
        into = self._admit(header, writer)
        if into is not None:
            into.begin()
        begun_ns = time.monotonic_ns()
        try:
            with self._cut_later(writer.incarnation):
                async with asyncio.timeout(BODY_DEADLINE_S):
                    views = await self._receive(peer, header, into.expect if into else None)
            received = await asyncio.to_thread(checksum, views) if into else 0
        except CorruptFrame as error:
            self._leftovers.over(writer.incarnation, header.ref.nonce)
            self._failed(into, TransferFault.CORRUPT, str(error))
        except TimeoutError:
            self._leftovers.over(writer.incarnation, header.ref.nonce)
            late = f"the body of chunk {header.chunk} does not come"
            self._failed(into, TransferFault.TIMEOUT, late)
        else:
            if into is not None:
                into.next_token = header.token_end
                elapsed_s = (time.monotonic_ns() - begun_ns) / 1e9
                self._arrived(into.expect, header, received, elapsed_s)
        finally:
            if into is not None:
                into.finish()

    def _admit(self, header: ChunkHeader, writer: PeerInfo) -> Landing | None:
        """Where the chunk may be written; None for nowhere, and why is counted and told."""
        landing = self._landings.get(header.ref.nonce)
        if landing is None:
            self._metrics.transfer_failed(TransferFault.STALE)
            return None
        problem = self._misfit(landing, header, writer)
        if problem is not None:
            self._failed(landing, TransferFault.REFUSED, problem)
            return None
        if header.token_start < landing.next_token:
            self._metrics.transfer_failed(TransferFault.DUPLICATE)  # it does no harm
            return None
        if header.token_start > landing.next_token:
            problem = f"chunk {header.chunk} does not follow token {landing.next_token}"
            self._failed(landing, TransferFault.GAP, problem)
            return None
        return landing

    @contextmanager
    def _cut_later(self, writer: str) -> Iterator[None]:
        """A body that stopped in the middle holds on to our memory until its peer is dropped."""
        timer = asyncio.get_running_loop().call_later(
            BODY_DEADLINE_S + FORGET_GRACE_S, lambda: self._tasks.spawn(self._drop(writer))
        )
        try:
            yield
        finally:
            timer.cancel()

    def _failed(self, landing: Landing | None, kind: TransferFault, problem: str) -> None:
        self._metrics.transfer_failed(kind)
        if landing is not None:
            self._report(RelayFailed(landing.expect.ref, problem))

    def _arrived(
        self, expect: Expect, header: ChunkHeader, received: int, elapsed_s: float
    ) -> None:
        if header.ref.nonce not in self._landings:
            return  # forgotten while it came in
        if received != header.body_checksum:
            self._metrics.transfer_failed(TransferFault.CORRUPT)
            self._report(RelayFailed(expect.ref, f"checksum of chunk {header.chunk} is wrong"))
            return
        self._metrics.chunk_relayed(Direction.RECEIVED, header.blocks, header.body_bytes, elapsed_s)
        token = -1
        if header.first is not None:
            del self._landings[header.ref.nonce]
            self._leftovers.over(expect.writer, header.ref.nonce)
            token = header.first.token
        self._report(
            ChunkArrived(expect.ref, header.token_start, header.token_end, header.last, token)
        )

    def _misfit(self, landing: Landing, header: ChunkHeader, writer: PeerInfo) -> str | None:
        """Why this chunk may not be written where it asks to be (None: it may)."""
        expect, size = landing.expect, landing.expect.block_size
        first = (header.token_start - expect.first_missing) // size
        blocks = -(-(header.token_end - header.token_start) // size)
        checks = (
            (header.sender == writer.incarnation == expect.writer, "writer"),
            (header.receiver == self._incarnation, "receiver"),
            (header.ref == expect.ref, "attempt"),
            (
                expect.first_missing <= header.token_start < header.token_end <= expect.total,
                "range",
            ),
            ((header.token_start - expect.first_missing) % size == 0, "start"),
            (header.token_end % size == 0 or header.last, "end"),
            (header.blocks == blocks and first + blocks <= len(expect.blocks), "blocks"),
            (header.body_bytes == blocks * self._block_bytes, "bytes"),
        )
        wrong = [name for right, name in checks if not right]
        return f"chunk {header.chunk} does not fit its reservation: {wrong[0]}" if wrong else None

    async def _receive(
        self, peer: Peer, header: ChunkHeader, expect: Expect | None
    ) -> list[memoryview]:
        """Take the pieces off the wire, into the attempt's blocks or (None) into the sink.

        All of them, also behind one that is damaged: what is left would lie in the next one's way.
        """
        if header.body_bytes != header.blocks * self._block_bytes:
            raise CorruptFrame(f"{header.blocks} blocks cannot be {header.body_bytes} bytes")
        tag = body_tag(header.ref.nonce, header.chunk)
        first = 0
        if expect is not None:
            first = (header.token_start - expect.first_missing) // expect.block_size
        views: list[memoryview] = []
        damage: CorruptFrame | None = None
        for count in header.pieces:
            view = None
            if expect is not None and damage is None:
                view = self._run_view(expect, first, count)
                if view is None:
                    damage = CorruptFrame("a piece spans blocks that are not adjacent here")
            if view is None:
                view = self._sink_view(count * self._block_bytes)
            try:
                await self._transport.recv(peer, tag, view)
            except CorruptFrame as error:
                damage = damage or error
            views.append(view)
            first += count
        if damage is not None:
            raise damage
        return views

    def _run_view(self, expect: Expect, first: int, count: int) -> memoryview | None:
        """None where they do not lie side by side."""
        blocks = expect.blocks[first : first + count]
        if any(block != blocks[0] + i for i, block in enumerate(blocks)):
            return None
        return self._view(blocks[0], count)

    def _sink_view(self, size: int) -> memoryview:
        if len(self._sink) < size:
            self._sink = bytearray(size)
        return memoryview(self._sink)[:size]
