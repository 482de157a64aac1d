"""Runs requests: performs what the leg machines decide, and hands their tokens to the HTTP edge.

Everything here is on the router's event loop. A request ends when each of its legs has; one leg
that fails takes the others with it, for half an answer is none.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.services.router import policy
from kvrelay.services.router.admission import Admission
from kvrelay.services.router.available import Available, Roster
from kvrelay.services.router.choreography import (
    Action,
    Choose,
    Emit,
    Enter,
    Finish,
    LegMachine,
    Send,
    Stage,
    WorkerEnd,
    event_ref,
)
from kvrelay.services.router.drains import Drains
from kvrelay.services.router.generation import Readiness
from kvrelay.services.router.leaving import Leaving
from kvrelay.services.router.observe import Observer
from kvrelay.services.router.placement import Placement
from kvrelay.services.router.route import Route
from kvrelay.services.router.running import RunningLeg, RunningRequest
from kvrelay.shared.errors import KvrelayError, Unavailable, WorkerFailed
from kvrelay.shared.rpc.convert import ref_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.telemetry.labels import LegEnd
from kvrelay.shared.types import ValidRequest

log = logging.getLogger(__name__)

NONCE_BITS = 48


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest time in each stage of a leg, in seconds."""

    choosing_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    idle_s: float

    def of(self, stage: Stage) -> float:
        return {
            Stage.CHOOSING: self.choosing_s,
            Stage.QUEUED: self.queue_s,
            Stage.PREFILLING: self.prefill_s,
            Stage.HANDING_OFF: self.transfer_s,
            Stage.DECODING: self.idle_s,
        }[stage]


class Dispatcher:
    """The `Cluster` of the HTTP edge."""

    def __init__(
        self,
        placement: Placement,
        admission: Admission,
        observer: Observer,
        deadlines: Deadlines,
    ) -> None:
        self._placement = placement
        self._admission = admission
        self._observer = observer
        self._deadlines = deadlines
        self._legs: dict[str, tuple[RunningRequest, RunningLeg]] = {}
        self._tasks = TaskSet()
        self._roster: Roster
        self._available: Available
        self.draining = False
        self._drains = Drains(self)
        self._one_ended = asyncio.Event()
        self._leaving = Leaving(observer.metrics.freed, observer.clock.now_ns)

    def join(self, roster: Roster) -> None:
        """Once, before the first request: the workers, who report to `on_event` and `on_lost`."""
        self._roster = roster
        self._available = Available(roster, self._drains)

    # ---- for the HTTP edge -------------------------------------------------------------------

    def readiness(self) -> Readiness:
        if self.draining:
            return Readiness(False, "shutting down")
        return self._available.readiness()

    def legs(self) -> list[tuple[RunningRequest, RunningLeg]]:
        """All that are not over."""
        return [*self._legs.values()]

    def draining_workers(self) -> frozenset[str]:
        """Those that were told to go and get nothing new."""
        return frozenset(self._drains.workers)

    def traceparent(self, leg: str) -> str:
        """Of a leg that is not over; empty if it has none."""
        found = self._legs.get(leg)
        return found[0].watch.traceparent if found is not None else ""

    def generate(self, request: ValidRequest) -> RunningRequest:
        """What it returns ends exactly once. Raises `Overloaded` or `Unavailable`."""
        if self.draining:
            raise Unavailable("the server is shutting down")
        self._available.check()
        self._admission.enter(len(request.legs), tuple(spec.prompt for spec in request.legs))
        self._roster.look()
        watch = self._observer.begin(request)
        running = RunningRequest(self, request, watch)
        for number, spec in enumerate(request.legs):
            machine = LegMachine(
                spec, number, lambda: secrets.randbits(NONCE_BITS), watch.traceparent
            )
            leg = RunningLeg(machine)
            running.legs.append(leg)
            self._legs[spec.leg] = (running, leg)
        for leg in running.legs:
            self._perform(running, leg, leg.machine.begin())
        return running

    def stop_leg(self, running: RunningRequest, number: int) -> None:
        leg = running.legs[number]
        self._perform(running, leg, leg.machine.complete())

    def end(self, running: RunningRequest, error: KvrelayError | None) -> None:
        """Cancel what still runs of a request. Idempotent."""
        for leg in running.legs:
            actions = leg.machine.fail(error) if error is not None else leg.machine.cancel()
            self._perform(running, leg, actions)

    async def drain(self, seconds: float) -> None:
        """Take no new requests, give the running ones `seconds` to end, then end them."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._legs:
                    await self._one_ended.wait()
                    self._one_ended.clear()
        except TimeoutError:
            for running, _ in [*self._legs.values()]:
                self.end(running, Unavailable("the server is shutting down"))

    # ---- from the workers --------------------------------------------------------------------

    def on_event(self, worker: str, event: pb.Event) -> None:
        ref = event_ref(event)
        if event.WhichOneof("kind") == "ended":
            self._leaving.ended(worker, ref_from_wire(ref))
            self._observer.heard(worker, event.ended)
        found = self._legs.get(ref.leg)
        if self._unwanted(found, ref, event):
            # Its cancel was lost, or came before what it was about: no other will follow.
            link = self._roster.link(worker)
            if link is not None and link.open:
                link.send(pb.Command(cancel=ref))
            return
        if found is None:  # over for everybody, its cancel is on the way; or not about a leg
            if event.WhichOneof("kind") == "draining":
                self._available.note()
                self._drains.begin(worker, event.draining.remaining_ms / 1e3)
            return
        running, leg = found
        if event.WhichOneof("kind") == "ended":
            self._placement.ended(worker, ref.leg)
        self._perform(running, leg, leg.machine.on_event(worker, event))

    @staticmethod
    def _unwanted(
        found: tuple[RunningRequest, RunningLeg] | None, ref: pb.Ref, event: pb.Event
    ) -> bool:
        """Whether somebody waits, and will hold memory, for an attempt that is over."""
        if event.WhichOneof("kind") not in ("need_room", "room"):
            return False
        return found is None or found[1].machine.ref != ref_from_wire(ref)

    def on_lost(self, worker: str) -> None:
        self._leaving.lost(worker)
        self._available.note()
        self._placement.lost(worker)  # first: who goes on elsewhere is placed without it
        self._drains.over(worker)
        for running, leg in [*self._legs.values()]:
            self._perform(running, leg, leg.machine.worker_lost(worker))

    # ---- workers that are about to go ----------------------------------------------------------

    def needing(self, worker: str) -> list[tuple[RunningRequest, RunningLeg]]:
        return [(running, leg) for running, leg in self._legs.values() if leg.machine.needs(worker)]

    def leave(self, running: RunningRequest, leg: RunningLeg, worker: str) -> bool:
        """Go on with a leg at other workers; False while there are none."""
        if leg.machine.needs(worker):
            if not self._available.candidates(running, frozenset()):
                return False
            self._perform(running, leg, leg.machine.leave(worker))
        return True

    # ---- performing --------------------------------------------------------------------------

    def _perform(self, running: RunningRequest, leg: RunningLeg, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit):
                if leg.waits:
                    self._first_token(running, leg)
                running.emit(action.event)
            elif isinstance(action, Send):
                link = self._roster.link(action.worker)
                if link is not None and link.open:
                    link.send(action.command)
                    self._leaving.sent(action.worker, action.command)
                    if action.command.WhichOneof("kind") in ("serve", "reserve"):
                        running.watch.sent(leg.machine.ref, action.worker)
            elif isinstance(action, Enter):
                self._enter(running, leg, action.stage)
            elif isinstance(action, Choose):
                self._placement.over(leg.machine.spec.leg)
                leg.choosing = self._tasks.spawn(self._choose(running, leg, action.excluded))
            elif isinstance(action, Finish):
                self._finish(running, leg, action.error)

    def _enter(self, running: RunningRequest, leg: RunningLeg, stage: Stage) -> None:
        if leg.timer is not None:
            leg.timer.cancel()
        seconds = self._deadlines.of(stage)
        loop = asyncio.get_running_loop()
        leg.timer = loop.call_later(seconds, self._expired, running, leg, stage, seconds)
        running.watch.stage(leg.machine, stage)

    def _expired(
        self, running: RunningRequest, leg: RunningLeg, stage: Stage, seconds: float
    ) -> None:
        self._perform(running, leg, leg.machine.expired(stage, seconds))

    def _finish(self, running: RunningRequest, leg: RunningLeg, error: KvrelayError | None) -> None:
        if leg.timer is not None:
            leg.timer.cancel()
        if leg.choosing is not None and leg.choosing is not asyncio.current_task():
            leg.choosing.cancel()
        self._placement.finished(leg.machine)
        self._legs.pop(leg.machine.spec.leg, None)
        self._one_ended.set()
        self._dequeue(leg)
        running.watch.leg_ended(leg.machine, error)
        self._leaving.over(leg.machine.ref, leg_end(leg.machine, error))
        if isinstance(error, WorkerFailed):
            log.warning("a leg failed: %s", error, extra={"leg": leg.machine.spec.leg})
        running.open_legs -= 1
        last = running.open_legs == 0  # asked now: ending the others comes back here for each
        if error is not None and running.conclude(error):
            self.end(running, error)
        elif last:
            running.conclude(None)
        if last:
            running.watch.ended()

    def _dequeue(self, leg: RunningLeg) -> None:
        if leg.queued:
            leg.queued = False
            self._admission.leave()

    # ---- choosing workers --------------------------------------------------------------------

    async def _choose(
        self, running: RunningRequest, leg: RunningLeg, excluded: frozenset[str]
    ) -> None:
        try:
            await self._start_attempt(running, leg, excluded)
        except Exception as error:
            named = {"leg": leg.machine.spec.leg}
            log.exception("an attempt at a leg could not be started", extra=named)
            failure = WorkerFailed(f"the attempt could not be started: {type(error).__name__}")
            self._perform(running, leg, leg.machine.fail(failure))

    async def _start_attempt(
        self, running: RunningRequest, leg: RunningLeg, excluded: frozenset[str]
    ) -> None:
        """Find workers and start the attempt; the stage's deadline ends a wait that is in vain."""
        machine = leg.machine
        if machine.attempt < 0:
            self._enter(running, leg, Stage.CHOOSING)
        try:
            route = await self._first_choice(running, leg) or await self._place(
                running, machine, excluded
            )
        except KvrelayError as error:
            self._perform(running, leg, machine.fail(error))
            return
        leg.route, leg.waits = route, True
        running.watch.routed(machine, route)
        workers = [site.worker for site in (route.first, route.decode) if site is not None]
        ends = [worker_end(worker) for worker in workers]
        self._perform(running, leg, machine.assign(ends[0], ends[1] if route.decode else None))
        for worker in workers:
            # A stream that broke between the choice and the first word: nobody else would tell.
            if not self._open(worker.incarnation):
                self._perform(running, leg, machine.worker_lost(worker.incarnation))

    async def _first_choice(self, running: RunningRequest, leg: RunningLeg) -> Route | None:
        """The route of the prompt's first choice, for the first attempt at another one."""
        first = running.legs[leg.machine.number - leg.machine.spec.choice]
        if first is leg or leg.machine.attempt >= 0:
            return None
        if first.choosing is not None:
            await asyncio.wait((first.choosing,))
        if first.route is None or not all(map(self._open, first.route.workers)):
            return None
        return self._placement.follow(leg.machine, first.route)

    async def _place(
        self, running: RunningRequest, machine: LegMachine, excluded: frozenset[str]
    ) -> Route:
        while not (found := self._available.candidates(running, excluded)):
            await self._available.change(begun=machine.attempt >= 0)
        running.group = found.group
        return await self._placement.place(machine, found)

    def _open(self, incarnation: str) -> bool:
        link = self._roster.link(incarnation)
        return link is not None and link.open

    def _first_token(self, running: RunningRequest, leg: RunningLeg) -> None:
        """Of this attempt: its prompt is computed."""
        leg.waits = False
        self._placement.computed(leg.machine.spec.leg)
        self._dequeue(leg)
        running.watch.first_token(leg.machine.number)


def leg_end(machine: LegMachine, error: KvrelayError | None) -> LegEnd:
    if error is not None:
        return LegEnd.FAILED
    return LegEnd.FINISHED if machine.answered else LegEnd.CANCELLED


def worker_end(worker: policy.LiveWorker) -> WorkerEnd:
    record = worker.record
    peer = pb.Peer(
        incarnation=record.incarnation,
        scheme=record.transfer_scheme,
        address=record.transfer_address,
    )
    return WorkerEnd(record.incarnation, peer)
