"""Who is alive: leases from the store, streams to the workers, and their agreement.

A worker is used while its stream is open. It is lost when the stream breaks, or when its lease
ended and it does not say itself that it is well: a Redis that was wiped takes no worker with it.

A frozen worker is lost 1.72 s after its last renewal at the latest: it is late after 0.9 s and then
asked until its lease ends (1.5 s), and the next look at the store finds that (0.2 s and a round
trip). At rest the router's own renewal, each 0.5 s, tells it that somebody is late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from kvrelay.services.router.links import Link, OnEvent, OnLost, OnOpen, at_once, reason
from kvrelay.services.router.meetings import Meetings, Orders
from kvrelay.services.router.policy import NO_LOAD, LiveWorker, misfits, readiness
from kvrelay.shared.errors import StoreError
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.directory import ClusterSnapshot, ClusterStore, WorkerView
from kvrelay.shared.store.keys import LATE_MS, LEASE_MS
from kvrelay.shared.store.records import LoadRecord, WorkerRecord
from kvrelay.shared.tasks import TaskSet

log = logging.getLogger(__name__)

POLL_S = 0.2
IDLE_POLL_S = 60.0
"""At rest: a broken stream tells of itself, the lease's renewal tells who came or went, and the
next request looks again at once."""
ASK_DEADLINE_S = 0.25


@dataclass(slots=True)
class Member:
    record: WorkerRecord
    load: LoadRecord
    link: Link
    late: bool = False
    """It has missed a renewal."""
    silent: bool = False
    """Late, and it did not answer when it was asked since."""


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """One of the registered workers, as a router knows it."""

    record: WorkerRecord
    load: LoadRecord
    live: bool
    late: bool


class Membership:
    """`run` keeps the view; `live` reads it. All on one event loop."""

    def __init__(
        self,
        store: ClusterStore,
        router: str,
        tokenizer: str,
        on_event: OnEvent,
        on_lost: OnLost,
    ) -> None:
        """`tokenizer`: identity of the router's own; workers with another are not used."""
        self._tokenizer = tokenizer
        self._store = store
        self._router = router
        self.meetings = Meetings()
        self._on_event = on_event
        self._on_lost = on_lost
        self._members: dict[str, Member] = {}
        self._asking: set[str] = set()
        self._tasks = TaskSet()
        self._rejected: tuple[str, ...] = ()
        self.store_up = True
        self._changed = asyncio.Event()
        self._look = asyncio.Event()
        self._viewed = asyncio.Event()
        self.busy: Callable[[], bool] = lambda: True
        self.prepare: OnOpen = at_once
        """Awaited each time before a worker can be used; `on_lost` tells that it no longer can."""

    def live(self) -> list[LiveWorker]:
        """Workers that can be given work now."""
        return [
            LiveWorker(member.record, member.load)
            for member in self._members.values()
            if member.link.open
            and self._speaks_our_ids(member.record)
            and self.meetings.settled(member.record.incarnation, self._now_s())
        ]

    def _speaks_our_ids(self, record: WorkerRecord) -> bool:
        return record.fingerprint.get("tokenizer") == self._tokenizer

    def seen(self) -> list[SeenWorker]:
        """All that are not known to be gone, and whether they can be given work."""
        live = {worker.incarnation for worker in self.live()}
        return [
            SeenWorker(member.record, member.load, name in live, member.late)
            for name, member in self._members.items()
        ]

    def known(self) -> list[WorkerRecord]:
        return [member.record for member in self._members.values()]

    def addresses(self) -> dict[str, str]:
        """Where those can be asked that are not known to be gone, by incarnation."""
        return {name: member.record.grpc_address for name, member in self._members.items()}

    def link(self, incarnation: str) -> Link | None:
        member = self._members.get(incarnation)
        return member.link if member is not None else None

    async def first_view(self) -> None:
        """Until the workers that are registered now can be used, as far as they can."""
        await self._viewed.wait()
        for member in [*self._members.values()]:
            await member.link.tried.wait()

    async def wait_change(self) -> None:
        """Until the view may have changed."""
        self._changed.clear()
        await self._changed.wait()

    def look(self) -> None:
        """Work has come, or somebody came or went: a router at rest looks at once."""
        self._look.set()

    async def run(self) -> None:
        try:
            while True:
                self._look.clear()
                try:
                    self._store_answers(await self._store.snapshot())
                except StoreError as error:
                    self._store_away(error)
                self._viewed.set()
                await self._pause()
        finally:
            await self._tasks.cancel()
            for member in [*self._members.values()]:
                await member.link.close()

    async def _pause(self) -> None:
        if not self._at_rest():
            # The poll's own pace, not a wait for something.
            await asyncio.sleep(POLL_S)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_POLL_S):
                await self._look.wait()

    def _at_rest(self) -> bool:
        if readiness(self.live()).missing or not self.store_up:
            return False
        for name, member in self._members.items():
            unsettled = member.link.open and not self.meetings.settled(name, self._now_s())
            if member.late or unsettled:
                return False
        return not self._asking and not self.busy()

    def _store_away(self, error: StoreError) -> None:
        if self.store_up:
            log.warning("%s; going on with the last view of the cluster", error)
        self.store_up = False
        for member in self._members.values():  # what was heard before says nothing any more
            member.late = member.silent = False
        self._signal()  # a stream that was broken may be open again

    def _store_answers(self, snapshot: ClusterSnapshot) -> None:
        if not self.store_up:
            log.warning("Redis answers again")
        self.store_up = True
        if snapshot.rejected != self._rejected:
            self._rejected = snapshot.rejected
            for line in snapshot.rejected:
                log.warning("ignored: %s", line)
        present = set()
        newcomers = [
            v.record for v in snapshot.workers if v.record.incarnation not in self._members
        ]
        for view in snapshot.workers:
            present.add(view.record.incarnation)
            self._seen(view.record, view.load or NO_LOAD)
            self._look_closely(self._members[view.record.incarnation], view)
        self._report_misfits(newcomers)
        for incarnation in self._members.keys() - present:
            if incarnation not in self._asking:
                self._asking.add(incarnation)
                self._tasks.spawn(self._missing(self._members[incarnation]))
        self._tell(self.meetings.due(self._now_s()))
        self._signal()

    def _seen(self, record: WorkerRecord, load: LoadRecord) -> None:
        member = self._members.get(record.incarnation)
        if member is not None:
            member.load = load
            return
        if not self._speaks_our_ids(record):
            log.warning(
                "%s worker %s is not used: its tokenizer is %s, the router's %s",
                record.role,
                record.name,
                record.fingerprint.get("tokenizer"),
                self._tokenizer,
            )
        link = Link(record.incarnation, record.grpc_address, self._router, self._heard, self._lost)
        link.prepare = self.prepare
        link.opened = self._opened
        link.needed = lambda: self.busy()
        self._members[record.incarnation] = Member(record, load, link)
        log.info("found %s worker %s at %s", record.role, record.name, record.grpc_address)

    def _look_closely(self, member: Member, view: WorkerView) -> None:
        was_late, member.late = member.late, view.renewed_ms > LATE_MS
        if not member.late:
            member.silent = False
        elif not was_late and view.record.incarnation not in self._asking:
            self._asking.add(view.record.incarnation)
            left_s = (LEASE_MS - view.renewed_ms) / 1000
            self._tasks.spawn(self._late(member, max(left_s, ASK_DEADLINE_S)))

    async def _late(self, member: Member, seconds: float) -> None:
        """Asked while the lease still holds: when it has ended there is nothing to wait for."""
        try:
            silent = not await self._well(member, seconds)
            member.silent = silent and member.late
        finally:
            self._asking.discard(member.record.incarnation)

    def _report_misfits(self, newcomers: list[WorkerRecord]) -> None:
        """Those that nobody can be paired with are named by the field that differs."""
        for record, other, difference in misfits(newcomers, self.known()):
            log.warning(
                "%s worker %s is not paired with %s worker %s: %s",
                record.role,
                record.name,
                other.role,
                other.name,
                difference,
            )

    async def _missing(self, member: Member) -> None:
        """The lease is gone: lost, unless the worker itself says otherwise."""
        try:
            heard = member.link.open and not member.silent
            if not (heard and await self._well(member, ASK_DEADLINE_S)):
                await self._drop(member)
        finally:
            self._asking.discard(member.record.incarnation)

    async def _well(self, member: Member, seconds: float) -> bool:
        address = member.record.grpc_address
        try:
            async with (
                asyncio.timeout(seconds),
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
            ):
                reply = await worker_stub(channel).Inspect(pb.InspectRequest())
        except (grpc.RpcError, TimeoutError) as error:
            log.info("worker %s does not answer: %s", member.record.name, reason(error))
            return False
        return bool(reply.healthy and reply.incarnation == member.record.incarnation)

    async def _drop(self, member: Member) -> None:
        log.warning("%s worker %s is gone: its lease ended", member.record.role, member.record.name)
        self._members.pop(member.record.incarnation, None)
        self._tell(self.meetings.gone(member.record))
        await member.link.close()
        self._signal()

    def _opened(self, incarnation: str) -> None:
        record = self._members[incarnation].record
        self._tell(self.meetings.opened(record, self._now_s()))
        self._signal()

    def _heard(self, incarnation: str, event: pb.Event) -> None:
        if event.WhichOneof("kind") != "met":
            self._on_event(incarnation, event)
            return
        if event.met.problem:
            log.warning(
                "prefill worker %s cannot reach decode worker %s: %s",
                incarnation,
                event.met.decode,
                event.met.problem,
            )
        self.meetings.heard(incarnation, event.met, self._now_s())
        self._signal()

    def _tell(self, orders: Orders) -> None:
        for incarnation, command in orders:
            self._members[incarnation].link.send(command)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _lost(self, incarnation: str) -> None:
        self.meetings.closed(incarnation)
        self._on_lost(incarnation)
        self.look()
        self._signal()

    def _signal(self) -> None:
        self._changed.set()
