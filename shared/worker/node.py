"""One worker between its three neighbours: router streams, the engine's thread, and the relay.

Everything here runs on the event loop. Instructions come from the engine in batches, one per step;
events go back through its inbox. The node keeps only what the engine does not care about: who the
peers are, and which router stream takes which answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from functools import singledispatchmethod

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.errors import Overloaded
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.rpc.convert import (
    finish_to_wire,
    leg_from_wire,
    logprobs_to_wire,
    ref_from_wire,
    ref_to_wire,
    timeline_to_wire,
)
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.timeline import Moment
from kvrelay.shared.transfer.wire import MAX_PROBE_BYTES
from kvrelay.shared.types import LegRef
from kvrelay.shared.worker.audit import Auditor, RelayFacts, audit_reply
from kvrelay.shared.worker.grammars import GrammarGate
from kvrelay.shared.worker.journal import LegJournal
from kvrelay.shared.worker.meeting import MAX_ROUNDS, Meeting
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.peers import PeerInfo
from kvrelay.shared.worker.quiet import QuietWatch
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender
from kvrelay.shared.worker.wiring import (
    OF_ATTEMPT,
    OfAttempt,
    ended_to_wire,
    gone,
    met_to_wire,
    peer_from_wire,
)

log = logging.getLogger(__name__)

_INCARNATION = re.compile(r"[0-9a-f]{32}")


class Node:
    """`connect` joins it to its relay and engine before the first stream attaches."""

    def __init__(self, incarnation: str, journal: LegJournal, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._incarnation = incarnation
        self._journal = journal
        self._traces: dict[LegRef, str] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._work: dict[str, set[LegRef]] = {}
        """By router stream: attempts that it began here, neither cancelled nor ended."""
        self._peers: dict[LegRef, PeerInfo] = {}
        self._here: set[LegRef] = set()
        """Attempts that were begun here and have not said that they ended."""
        self._engine: EngineLoop
        self._sender: Sender
        self._receiver: Receiver
        self._auditor: Auditor
        self._quiet: QuietWatch
        self.gate: GrammarGate
        self._loop = asyncio.get_running_loop()
        self.remaining_ms: Callable[[], int | None] = lambda: None
        """How long this worker will be there; None for no end."""
        self.serving = True
        """The engine makes progress, as far as anybody looked."""
        self._probing = False
        self.on_work: Callable[[], None] = lambda: None
        """Called before the engine is given something."""

    def connect(
        self, engine: EngineLoop, sender: Sender, receiver: Receiver, grammars: GrammarStore
    ) -> None:
        self._engine, self._sender, self._receiver = engine, sender, receiver
        self.gate = GrammarGate(grammars, engine.post, self._perform)
        self._auditor = Auditor(engine.post)
        self._quiet = QuietWatch(self._loop, lambda: self.legs, engine.post)

    @property
    def incarnation(self) -> str:
        return self._incarnation

    def retire(self) -> None:
        """End every router's stream: this incarnation is over."""
        self._quiet.close()
        self._end_streams()

    def progresses(self, serving: bool) -> None:
        """Whether the engine does: one that does not loses its routers, who go on elsewhere."""
        self.serving = serving
        if not serving:
            self._end_streams()

    def _end_streams(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()

    # ---- from routers ------------------------------------------------------------------------

    def attach(self, owner: str, outbox: Outbox) -> None:
        self._outboxes[owner] = outbox
        self._work[owner] = set()
        log.info("router %s attached", owner)
        self._announce_drain(outbox)

    def announce_drain(self) -> None:
        """Routers that attach later learn it then."""
        for outbox in self._outboxes.values():
            self._announce_drain(outbox)

    def _announce_drain(self, outbox: Outbox) -> None:
        remaining_ms = self.remaining_ms()
        if remaining_ms is not None:
            outbox.put(pb.Event(draining=pb.Draining(remaining_ms=remaining_ms)))

    @property
    def legs(self) -> int:
        """Attempts that are here, in any phase."""
        return len(self._engine.engine.state.legs) + len(self.gate)

    def detach(self, owner: str) -> None:
        del self._outboxes[owner], self._work[owner]
        self.gate.owner_gone(owner)
        self._engine.post(m.OwnerGone(owner))
        log.info("router %s left", owner)

    def command(self, owner: str, command: pb.Command) -> None:
        self.on_work()
        kind = command.WhichOneof("kind")
        if kind == "serve":
            self._serve(owner, command.serve)
        elif kind == "reserve":
            self._reserve(owner, command.reserve)
        elif kind in OF_ATTEMPT:
            self._go_on(owner, OF_ATTEMPT[kind](command))
        elif kind == "meet":
            self._meet(owner, command.meet)
        elif kind == "gone":
            self._receiver.lose(command.gone)
            self._sender.lose(command.gone)

    def _go_on(self, owner: str, event: OfAttempt) -> None:
        """About an attempt that was begun here. One that is not here any more, or never was for its
        beginning was lost, is said to have ended: whoever asks would wait for its deadline."""
        ref = event.ref
        if ref not in self._here:
            self._say(owner, gone(event))
        elif not isinstance(event, m.Cancel):
            self._engine.post(event)
        else:
            self._work[owner].discard(ref)
            if not self.gate.cancel(ref):
                self._engine.post(event)
        if isinstance(event, m.RoomGranted):
            self._journal.stamp(ref, Moment.ROOM)

    def works_for(self, owner: str) -> bool:
        """Whether that stream's router waits for something from here."""
        return bool(self._work[owner])

    def _serve(self, owner: str, serve: pb.Serve) -> None:
        ref = ref_from_wire(serve.ref)
        handoff = serve.HasField("decode")
        if handoff:
            self._peers[ref] = peer_from_wire(serve.decode)
        self._journal.begin(ref, "prefill" if handoff else "both", serve.traceparent)
        self._begun(ref, serve.traceparent, "computes a prompt")
        spec = leg_from_wire(ref.leg, serve.leg)
        self._work[owner].add(ref)
        self._here.add(ref)
        self._quiet.begin()
        self.gate.admit(m.Serve(owner, ref, spec, handoff, serve.decode.incarnation))

    def _reserve(self, owner: str, reserve: pb.Reserve) -> None:
        ref = ref_from_wire(reserve.ref)
        self._peers[ref] = peer_from_wire(reserve.prefill)
        self._journal.begin(ref, "decode", reserve.traceparent)
        self._begun(ref, reserve.traceparent, "takes an answer over")
        spec = leg_from_wire(ref.leg, reserve.leg)
        self._work[owner].add(ref)
        self._here.add(ref)
        self._quiet.begin()
        self.gate.admit(m.Reserve(owner, ref, spec, reserve.prefill.incarnation))

    def _begun(self, ref: LegRef, traceparent: str, what: str) -> None:
        self._traces[ref] = traceparent
        log.debug(what, extra={"leg": ref.leg, "attempt": ref.attempt})

    def traceparent(self, leg: str) -> str:
        """Of a leg that is here. For a line of the log: any thread may ask, and few do."""
        return next((trace for ref, trace in [*self._traces.items()] if ref.leg == leg), "")

    def _meet(self, owner: str, meet: pb.Meet) -> None:
        for prefill in meet.prefills:
            self._receiver.meet(peer_from_wire(prefill))
        for decode in meet.decodes:

            def told(found: Meeting, name: str = decode.incarnation) -> None:
                self._say(owner, pb.Event(met=met_to_wire(name, found)))

            self._sender.meet(peer_from_wire(decode), told)

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        """Raises `ValueError` for more than a probe may be, `Overloaded` while one is under way."""
        for name, value, most in (
            ("body_bytes", request.body_bytes, MAX_PROBE_BYTES),
            ("rounds", request.rounds, MAX_ROUNDS),
        ):
            if request.HasField("decode") and not 1 <= value <= most:
                raise ValueError(f"{name}: must be 1 to {most}, got {value}")
        for peer in (request.prefill, request.decode):
            if peer.incarnation and not _INCARNATION.fullmatch(peer.incarnation):
                raise ValueError(f"incarnation: must be 32 hex digits, got {peer.incarnation!r}")
        reply = pb.ProbeReply(
            incarnation=self._incarnation,
            wall_ns=time.time_ns(),
            transport=self._sender.transport.describe(),
        )
        if request.HasField("prefill"):
            self._receiver.meet(peer_from_wire(request.prefill))
        if request.HasField("decode"):
            to = peer_from_wire(request.decode)
            if self._probing:
                raise Overloaded("a probe is under way", retry_after_s=1.0)
            self._probing = True
            try:
                found = await self._sender.visit(to, request.body_bytes, request.rounds)
            finally:
                self._probing = False
            reply.lane.CopyFrom(met_to_wire(to.incarnation, found))
        return reply

    async def inspect(self) -> pb.InspectReply:
        state = self._engine.engine.state
        counts = state.pool.counts()
        return pb.InspectReply(
            incarnation=self._incarnation,
            total_blocks=counts.total,
            free_blocks=counts.free,
            cached_idle_blocks=counts.cached_idle,
            in_use_blocks=counts.in_use,
            quarantined_blocks=counts.quarantined,
            waiting=len(state.waiting) + len(state.reserving),
            running=len(state.running),
            healthy=self._healthy(),
            legs=self.legs,
            holders=sorted(leg.key for leg in [*state.legs.values()] if leg.blocks),
        )

    def legs_of(self, router: str) -> list[str]:
        """Those that any of its streams began, gone ones too, and that have not ended: a stream's
        end cancels its legs, but what a transfer or a step still touches is let go after that."""
        legs = [*self._engine.engine.state.legs.values()]
        return sorted({leg.ref.leg for leg in legs if leg.owner.rpartition("/")[0] == router})

    async def audit(self) -> pb.AuditReply:
        """Raises `TimeoutError` when the engine makes no turn."""
        engine = await self._auditor.ask()
        receiver = self._receiver
        relay = RelayFacts(
            receiver.expected, receiver.lanes, self._sender.lanes, receiver.kept_bytes
        )
        return audit_reply(self._incarnation, engine, relay)

    # ---- from the engine ---------------------------------------------------------------------

    def deliver(self, out: list[m.Instruction]) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._perform_all, out)

    def _perform_all(self, out: list[m.Instruction]) -> None:
        for instruction in out:
            self._perform(instruction)

    def _say(self, owner: str, event: pb.Event, *, large: bool = False) -> None:
        outbox = self._outboxes.get(owner)
        if outbox is not None:
            outbox.put(event)
            if large:
                outbox.cut()

    @singledispatchmethod
    def _perform(self, instruction: m.Instruction) -> None:
        raise TypeError(f"no such instruction: {instruction!r}")

    @_perform.register
    def _(self, it: m.NeedRoom) -> None:
        self._journal.stamp(it.ref, Moment.ASKED)
        self._say(it.owner, pb.Event(need_room=ref_to_wire(it.ref)))

    @_perform.register
    def _(self, it: m.Room) -> None:
        self._journal.stamp(it.ref, Moment.ROOM)
        room = pb.Room(
            ref=ref_to_wire(it.ref),
            first_missing_token=it.first_missing,
            run_blocks=it.run_blocks,
        )
        self._say(it.owner, pb.Event(room=room))

    @_perform.register
    def _(self, it: m.Started) -> None:
        self._journal.stamp(it.ref, Moment.PREFILL_STARTED)
        started = pb.Started(ref=ref_to_wire(it.ref), cached_tokens=it.cached)
        self._say(it.owner, pb.Event(started=started))

    @_perform.register
    def _(self, it: m.TokenOut) -> None:
        self._journal.token(it.ref)
        token = pb.Token(
            ref=ref_to_wire(it.ref),
            index=it.index,
            token=it.token,
            finish=finish_to_wire(it.finish),
            logprobs=None if it.logprobs is None else logprobs_to_wire((it.logprobs,)),
        )
        if it.prompt_logprobs:
            token.prompt_logprobs.CopyFrom(logprobs_to_wire(it.prompt_logprobs))
        self._say(it.owner, pb.Event(token=token), large=bool(it.prompt_logprobs))

    @_perform.register
    def _(self, it: m.PublishedOut) -> None:
        self._journal.stamp(it.ref, Moment.PUBLISHED)
        published = pb.Published(ref=ref_to_wire(it.ref), relayed_tokens=it.tokens)
        self._say(it.owner, pb.Event(published=published))

    @_perform.register
    def _(self, it: m.Ended) -> None:
        self._peers.pop(it.ref, None)
        self._here.discard(it.ref)
        self.gate.ended(it.ref)
        pieces = self._journal.end(it.ref, it.reason, it.message)
        log.debug("%s", it.reason, extra={"leg": it.ref.leg, "attempt": it.ref.attempt})
        self._traces.pop(it.ref, None)
        self._work.get(it.owner, set()).discard(it.ref)
        timeline = timeline_to_wire(pieces, self._journal.now_ns())
        self._say(it.owner, pb.Event(ended=ended_to_wire(it, timeline)))

    @_perform.register
    def _(self, it: m.Audited) -> None:
        self._auditor.answered(it)

    @_perform.register
    def _(self, it: m.Push) -> None:
        self._sender.push(it, self._peers[it.ref])

    @_perform.register
    def _(self, it: m.Abandon) -> None:
        self._sender.abandon(it.ref)

    @_perform.register
    def _(self, it: m.Expect) -> None:
        self._receiver.expect(it, self._peers[it.ref])

    @_perform.register
    def _(self, it: m.Forget) -> None:
        self._receiver.forget(it.ref)
