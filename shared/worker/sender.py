"""Prefill's half of the relay: one lane per decode peer, chunks in order, straight from the pool.

A chunk is a header and its pieces: runs of blocks that lie adjacent at both ends. Every `Push` is
answered by exactly one `PushDone`, whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.shared.engine.messages import Push, PushDone
from kvrelay.shared.engine.pace import MeanTime
from kvrelay.shared.errors import PeerLost, TransferError
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.telemetry.labels import Direction, TransferFault
from kvrelay.shared.telemetry.metrics import WorkerMetrics
from kvrelay.shared.transfer.protocol import Peer, Transport
from kvrelay.shared.transfer.wire import (
    ChunkHeader,
    FirstToken,
    body_tag,
    checksum,
    common_runs,
    encode_header,
    header_tag,
)
from kvrelay.shared.types import Incarnation, LegRef
from kvrelay.shared.worker.meeting import FIRST_VISIT, Meeting, Visit, probe
from kvrelay.shared.worker.peers import PeerInfo

log = logging.getLogger(__name__)

BlockView = Callable[[int, int], memoryview]
"""(first block, count) -> the bytes of `count` adjacent blocks."""

CHUNK_DEADLINE_S = 5.0
"""A chunk that has not left by then goes to a peer that does not answer."""
IDLE_LANE_S = 120.0
"""Without a chunk for this long a lane may be dropped."""
ABANDON_GRACE_S = 0.5
"""What an abandoned chunk in flight still gets: its receiver drains it, or is gone."""


@dataclass(slots=True)
class Lane:
    """To one start of one decode worker."""

    to: PeerInfo
    jobs: deque[Push]
    filled: asyncio.Event
    peer: Peer | None = None
    sending: LegRef | None = None
    used_s: float = 0.0
    """When it was last given a chunk, in the loop's time."""
    task: asyncio.Task[None] | None = None
    hurry: asyncio.Event | None = None
    """Set when the chunk in flight was abandoned."""
    visits: deque[Visit] = field(default_factory=deque)
    met: Meeting | None = None
    """What the last visit found over the connection that there is."""


class Sender:
    """All calls on the transport's event loop. `done` takes the answers."""

    def __init__(
        self,
        transport: Transport,
        incarnation: Incarnation,
        view: BlockView,
        done: Callable[[PushDone], None],
        metrics: WorkerMetrics,
    ) -> None:
        self.transport = transport
        self._incarnation = incarnation
        self._view = view
        self._done = done
        self._metrics = metrics
        self._lanes: dict[str, Lane] = {}
        self._tasks = TaskSet()
        self.sent: Callable[[LegRef, int, int], None] = lambda ref, tokens, took_ns: None
        """Hears of each chunk that has left."""
        self.time = MeanTime()
        """What the KV of a token takes to leave, over all peers."""

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def push(self, push: Push, to: PeerInfo) -> None:
        lane = self._lane(to)
        lane.jobs.append(push)
        lane.filled.set()

    def meet(self, to: PeerInfo, told: Callable[[Meeting], None]) -> None:
        """Connect, unless that is done already, and say how the lane is."""
        lane = self._lane(to)
        if lane.met is not None and lane.peer is not None and lane.peer.alive:
            told(lane.met)
            return
        self._tasks.spawn(self._meet(to, told))

    async def visit(self, to: PeerInfo, body_bytes: int, rounds: int) -> Meeting:
        """Try the lane with so many probes, each when no chunk waits."""
        lane = self._lane(to)
        visit = Visit(body_bytes, rounds, asyncio.get_running_loop().create_future())
        lane.visits.append(visit)
        lane.filled.set()
        return await visit.outcome

    def _lane(self, to: PeerInfo) -> Lane:
        lane = self._lanes.get(to.incarnation)
        if lane is None:
            self._drop_idle_lanes()
            lane = Lane(to, deque(), asyncio.Event())
            self._lanes[to.incarnation] = lane
            lane.task = self._tasks.spawn(self._run(lane))
        lane.used_s = asyncio.get_running_loop().time()
        return lane

    async def _meet(self, to: PeerInfo, told: Callable[[Meeting], None]) -> None:
        found = await self.visit(to, *FIRST_VISIT)
        if found.problem:
            log.warning("decode worker %s cannot be met: %s", to.incarnation, found.problem)
        else:
            log.info(
                "met decode worker %s over %s: set up in %.1f ms, round trip %.2f ms, %.0f MB/s",
                to.incarnation,
                found.carried_by,
                found.setup_ns / 1e6,
                found.round_trip_ns / 1e6,
                found.bytes_per_s / 1e6,
            )
        told(found)

    def _drop_idle_lanes(self) -> None:
        """A worker that was replaced never says so: its lane goes when a newcomer's is made."""
        horizon_s = asyncio.get_running_loop().time() - IDLE_LANE_S
        for name, lane in [*self._lanes.items()]:
            busy = lane.sending is not None or lane.jobs or lane.visits
            if not busy and lane.used_s < horizon_s:
                del self._lanes[name]
                if lane.task is not None:
                    lane.task.cancel()

    def abandon(self, ref: LegRef) -> None:
        """Chunks of this attempt not yet begun never will be; the one in flight gets a moment."""
        for lane in self._lanes.values():
            dropped = [push for push in lane.jobs if push.ref == ref]
            if dropped:
                lane.jobs = deque(push for push in lane.jobs if push.ref != ref)
            for _ in dropped:
                self._done(PushDone(ref, "abandoned"))
            if lane.sending == ref and lane.hurry is not None:
                lane.hurry.set()

    def lose(self, receiver: str) -> None:
        """It is gone, dead or frozen: nothing that was meant for it can leave."""
        lane = self._lanes.get(receiver)
        if lane is None:
            return
        jobs, lane.jobs = lane.jobs, deque()
        for push in jobs:
            self._done(PushDone(push.ref, "the reader is gone"))
        if lane.hurry is not None:
            lane.hurry.set()
        if lane.peer is not None:
            self._tasks.spawn(self.transport.close_peer(lane.peer))

    async def close(self) -> None:
        """Stop all lanes; what was queued is answered with an error."""
        await self._tasks.cancel()

    async def _run(self, lane: Lane) -> None:
        try:
            while True:
                await lane.filled.wait()
                lane.filled.clear()
                while lane.jobs or lane.visits:
                    if not lane.jobs:
                        await self._probe(lane, lane.visits[0])
                        continue
                    push = lane.jobs.popleft()
                    error = await self._attempt(lane, push)
                    self._done(PushDone(push.ref, error))
        finally:
            for visit in lane.visits:
                visit.end(Meeting("the worker is stopping"))
            for push in lane.jobs:
                self._done(PushDone(push.ref, "the worker is stopping"))
            if lane.peer is not None:
                await self.transport.close_peer(lane.peer)

    async def _attempt(self, lane: Lane, push: Push) -> str | None:
        """Send one chunk; a failure drops the connection, so that the next makes a new one."""
        lane.sending, lane.hurry = push.ref, asyncio.Event()
        chunk = asyncio.create_task(self._send(lane, push))
        hurry = asyncio.create_task(lane.hurry.wait())
        try:
            await asyncio.wait(
                (chunk, hurry), timeout=CHUNK_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not chunk.done():
                await asyncio.wait((chunk,), timeout=ABANDON_GRACE_S)
            if not chunk.done():
                raise PeerLost(f"decode worker {lane.to.incarnation} takes no chunks")
            await chunk
            return None
        except TransferError as error:
            self._metrics.transfer_failed(TransferFault.PEER_LOST)
            named = {"leg": push.ref.leg, "attempt": push.ref.attempt}
            log.warning("chunk %d: %s", push.chunk, error, extra=named)
            await self._drop(lane, chunk)
            return str(error)
        finally:
            hurry.cancel()
            chunk.cancel()
            lane.sending = lane.hurry = None

    async def _drop(self, lane: Lane, chunk: asyncio.Task[None]) -> None:
        await self._disconnect(lane)
        chunk.cancel()
        await asyncio.gather(chunk, return_exceptions=True)

    async def _disconnect(self, lane: Lane) -> None:
        lane.met = None
        if lane.peer is not None:
            await self.transport.close_peer(lane.peer)
            lane.peer = None

    async def _connected(self, lane: Lane) -> Peer:
        if lane.peer is None or not lane.peer.alive:
            lane.peer = await self.transport.connect(lane.to.address)
        return lane.peer

    async def _probe(self, lane: Lane, visit: Visit) -> None:
        """The visit's next probe; one that fails is its last."""
        size, begun_ns = visit.next_bytes, time.monotonic_ns()
        names = self._incarnation, Incarnation(lane.to.incarnation)
        try:
            peer = await self._connected(lane)
            connected_ns = time.monotonic_ns() - begun_ns
            took_ns = await probe(self.transport, peer, names, size)
        except TransferError as error:
            lane.visits.remove(visit)
            if size or lane.peer is None or not lane.peer.alive:
                await self._disconnect(lane)
            # Else it may only not listen yet: it would take the end of this connection for ours.
            visit.end(Meeting(str(error)))
            return
        visit.took(size, connected_ns + took_ns)
        if visit.complete:
            lane.visits.remove(visit)
            lane.met = visit.found(self.transport.carried_by(peer))
            visit.end(lane.met)

    async def _send(self, lane: Lane, push: Push) -> None:
        peer = await self._connected(lane)
        pieces = tuple(common_runs(push.blocks, push.run_blocks))
        views = []
        first = 0
        for count in pieces:
            views.append(self._view(push.blocks[first], count))
            first += count
        header = ChunkHeader(
            ref=push.ref,
            sender=self._incarnation,
            receiver=Incarnation(lane.to.incarnation),
            chunk=push.chunk,
            token_start=push.start,
            token_end=push.end,
            pieces=pieces,
            body_bytes=sum(view.nbytes for view in views),
            body_checksum=await asyncio.to_thread(checksum, views),
            first=FirstToken(push.token, push.index) if push.last else None,
        )
        tag = body_tag(push.ref.nonce, push.chunk)
        begun_ns = time.monotonic_ns()
        await self.transport.send(peer, header_tag(self._incarnation), encode_header(header))
        for view in views:
            await self.transport.send(peer, tag, view)
        elapsed_ns = max(time.monotonic_ns() - begun_ns, 1)
        self.time.observe(push.end - push.start, elapsed_ns)
        self.sent(push.ref, push.end - push.start, elapsed_ns)
        self._metrics.chunk_relayed(
            Direction.SENT, len(push.blocks), header.body_bytes, elapsed_ns / 1e9
        )
