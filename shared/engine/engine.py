"""The engine as a machine without IO: events in, instructions out, one step at a time.

    out = engine.handle(event)          # something happened
    plan, out = engine.plan(budget)     # what to compute next
    out = engine.complete(plan, result) # it was computed

Every leg that came in leaves with exactly one `Ended`, sent when it holds nothing here any more.
"""

from __future__ import annotations

from functools import singledispatchmethod

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine import scheduler
from kvrelay.shared.engine.admission import grant_room
from kvrelay.shared.engine.audit import audited
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.push import push
from kvrelay.shared.engine.silence import silent
from kvrelay.shared.engine.state import EngineLimits, EngineState, Leg
from kvrelay.shared.engine.steering import steering_of
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import MAX_LOGPROBS, EndReason, FinishReason, LegRef, LegSpec, Logprobs

Out = list[m.Instruction]


class Engine:
    def __init__(self, limits: EngineLimits, blocks: int) -> None:
        self.state = EngineState(limits, BlockPool(blocks))
        self._out: Out = []
        self._block_size = limits.block_size
        self._longest = min(limits.max_model_len, blocks * limits.block_size)
        """Tokens after which a leg has no room for another."""

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, budget: int) -> tuple[Plan | None, Out]:
        return scheduler.plan(self.state, budget)

    def complete(self, plan: Plan, result: StepResult) -> Out:
        """Apply what a step computed. The legs of the plan are the ones that were running then."""
        self._landed()
        legs = {leg.key: leg for leg in self.state.running}
        for row in plan.rows:
            leg = legs.get(row.key)
            if leg is None:
                continue  # cancelled while the step ran
            if row.key in result.failed:
                self._end(leg, EndReason.FAILED, result.failed[row.key])
                continue
            leg.computed += len(row.tokens)
            self.state.name(leg)
            if row.told:
                leg.prompt_logprobs += result.prompt_logprobs[row.key]
            if row.sample:
                told = result.logprobs.get(row.key)
                self._sampled(leg, result.sampled[row.key], told, row.key in result.complete)
            elif leg.handoff:
                self._push(leg, last=False)
        return self._take()

    def fail_step(self, plan: Plan, message: str) -> Out:
        """The step raised: its legs end, nobody else is disturbed."""
        self._landed()
        legs = {leg.key: leg for leg in self.state.running}
        for row in plan.rows:
            if (leg := legs.get(row.key)) is not None:
                self._end(leg, EndReason.FAILED, message)
        return self._take()

    def _landed(self) -> None:
        """The step writes no more: what was kept for it is let go."""
        state = self.state
        state.stepping = None
        for source, _ in state.copies:
            state.pool.release([source])
        state.copies.clear()
        outliving, state.outliving = state.outliving, []
        for leg in outliving:
            self._drained(leg)

    # ---- events ------------------------------------------------------------------------------

    def handle(self, event: m.Event) -> Out:
        """Apply one event. One about an attempt that is not here is stale and changes nothing."""
        self._apply(event)
        return self._take()

    @singledispatchmethod
    def _apply(self, event: m.Event) -> None:
        raise TypeError(f"no such event: {event!r}")

    @_apply.register
    def _(self, event: m.Serve) -> None:
        leg = self._new_leg(event.owner, event.ref, event.spec, Phase.WAITING)
        if leg is not None:
            leg.handoff, leg.reader = event.handoff, event.reader
            self.state.arrive(leg)

    @_apply.register
    def _(self, event: m.Reserve) -> None:
        leg = self._new_leg(event.owner, event.ref, event.spec, Phase.RESERVING)
        if leg is not None:
            leg.writer = event.writer
            self.state.arrive(leg)
            grant_room(self.state, self._out)

    @_apply.register
    def _(self, event: m.RoomGranted) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is None or leg.phase is not Phase.ASKING:
            return
        leg.first_missing = leg.pushed_tokens = event.first_missing
        leg.run_blocks = event.run_blocks
        expected = self.state.blocks_for(leg.total) - event.first_missing // self._block_size
        if sum(event.run_blocks) != expected or event.first_missing % self._block_size:
            self._end(leg, EndReason.FAILED, "decode offered room of another shape", True)
            return
        self.state.answered(leg)
        self.state.granted_tokens += leg.total
        leg.move(Phase.READY)
        self.state.enqueue(leg)

    @_apply.register
    def _(self, event: m.Published) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is not None and leg.phase is Phase.HANDING_OFF:
            self._end(leg, EndReason.FINISHED)

    @_apply.register
    def _(self, event: m.Cancel) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is not None and leg.phase is not Phase.DRAINING:
            self._end(leg, EndReason.CANCELLED)

    @_apply.register
    def _(self, event: m.OwnerGone) -> None:
        for leg in [leg for leg in self.state.legs.values() if leg.owner == event.owner]:
            if leg.phase is not Phase.DRAINING:
                self._end(leg, EndReason.CANCELLED)

    @_apply.register
    def _(self, event: m.Look) -> None:
        for leg in silent(self.state, event.passed_ms):
            problem = f"nothing was heard for {leg.quiet_ms / 1e3:g} s in {leg.phase}"
            self._end(leg, EndReason.FAILED, problem, True)

    @_apply.register
    def _(self, event: m.Audit) -> None:
        self._out.append(audited(self.state, event.number))

    @_apply.register
    def _(self, event: m.PushDone) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is None:
            return
        leg.pushes -= 1
        assert leg.pushes >= 0, f"{leg.key}: more pushes done than begun"
        if leg.phase is Phase.DRAINING:
            self._drained(leg)
        elif event.error is not None:
            self._end(leg, EndReason.FAILED, event.error, True)

    @_apply.register
    def _(self, event: m.ChunkArrived) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is None or leg.phase is not Phase.RECEIVING:
            return
        complete = event.end == leg.total
        if event.start != leg.received or event.last != complete:
            problem = f"chunk [{event.start}, {event.end}) does not follow token {leg.received}"
            self._end(leg, EndReason.FAILED, problem, True)
            return
        leg.received = event.end
        if event.last:
            self._publish(leg, event.token)

    @_apply.register
    def _(self, event: m.RelayFailed) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is not None and leg.phase is Phase.RECEIVING:
            self._end(leg, EndReason.FAILED, event.error, True)

    @_apply.register
    def _(self, event: m.Forgotten) -> None:
        leg = self.state.legs.get(event.ref)
        if leg is not None and leg.phase is Phase.DRAINING:
            leg.writer = ""
            self._drained(leg)

    # ---- moves -------------------------------------------------------------------------------

    def _take(self) -> Out:
        out, self._out = self._out, []
        return out

    def _new_leg(self, owner: str, ref: LegRef, spec: LegSpec, phase: Phase) -> Leg | None:
        """A leg of this attempt, or None when it is here already or can never be computed here."""
        if ref in self.state.legs:
            return None
        if problem := self._misfit(spec):
            self._out.append(m.Ended(owner, ref, EndReason.FAILED, problem))
            return None
        leg = Leg(owner, ref, spec, phase, known=[*spec.prompt, *spec.seen])
        leg.steering = steering_of(spec, self.state.limits.vocab_size)
        self.state.legs[ref] = leg
        return leg

    def _misfit(self, spec: LegSpec) -> str | None:
        """Routers check all this; a worker does not trust them with its memory."""
        limits = self.state.limits
        length = len(spec.prompt) + len(spec.seen)
        if not spec.prompt:
            return "prompt: at least one token is needed"
        if length >= self._longest or len(spec.seen) >= spec.sampling.max_tokens:
            return f"prompt: {length} tokens leave no room to generate (limit {self._longest})"
        if not all(0 <= token < limits.vocab_size for token in (*spec.prompt, *spec.seen)):
            return f"prompt: a token id is outside the vocabulary of {limits.vocab_size}"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(spec.sampling, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                return f"{name}: {count} are not from 0 to {MAX_LOGPROBS}"
        return None

    def _sampled(
        self, leg: Leg, token: int, logprobs: Logprobs | None = None, complete: bool = False
    ) -> None:
        index = leg.outputs
        leg.known.append(token)
        finish = finish_reason(leg.spec, index, token, leg.total >= self._longest)
        if complete:
            finish = FinishReason.STOP
        told, leg.prompt_logprobs = tuple(leg.prompt_logprobs), []
        self._out.append(m.TokenOut(leg.owner, leg.ref, index, token, finish, logprobs, told))
        if finish is not None:
            self._end(leg, EndReason.FINISHED)
        elif leg.handoff:
            self._push(leg, last=True)
            self.state.running.remove(leg)
            leg.move(Phase.HANDING_OFF)

    def _push(self, leg: Leg, *, last: bool) -> None:
        self._out += push(leg, self.state.limits, last=last)

    def _publish(self, leg: Leg, token: int) -> None:
        hits = leg.first_missing // self._block_size
        self.state.pool.publish(leg.blocks[hits:])
        self.state.receiving -= 1
        leg.computed = leg.total
        self.state.name(leg)
        leg.writer = ""
        leg.move(Phase.RUNNING)
        self.state.running.append(leg)
        relayed = leg.total - leg.first_missing
        self._out.append(m.PublishedOut(leg.owner, leg.ref, relayed))
        self._sampled(leg, token)

    def _end(self, leg: Leg, reason: EndReason, message: str = "", retryable: bool = False) -> None:
        """Over for everybody; the blocks follow as soon as no transfer touches them."""
        leg.end = (reason, message, retryable)
        self._leave(leg)
        if leg.phase is Phase.RECEIVING:
            self.state.receiving -= 1
            self._out.append(m.Forget(leg.ref))
        else:
            leg.writer = ""
        if leg.pushes > 0:
            self._out.append(m.Abandon(leg.ref))
        if self.state.steps_with(leg):
            self.state.outliving.append(leg)
        leg.move(Phase.DRAINING)
        self._drained(leg)

    def _leave(self, leg: Leg) -> None:
        """Nobody plans with it any more, or waits for it."""
        if leg.phase is Phase.RUNNING:
            self.state.running.remove(leg)
        self.state.dequeue(leg)
        self.state.give_up(leg)

    def _drained(self, leg: Leg) -> None:
        if leg.pushes == 0 and not leg.writer and leg not in self.state.outliving:
            self._finish(leg)

    def _finish(self, leg: Leg) -> None:
        assert leg.end is not None
        reason, message, retryable = leg.end
        if reason is not EndReason.FAILED:
            self.state.name_tail(leg)
        self.state.pool.release(leg.blocks)
        leg.blocks = []
        leg.move(Phase.ENDED)
        del self.state.legs[leg.ref]
        self._out.append(m.Ended(leg.owner, leg.ref, reason, message, retryable))
        if self.state.reserving:
            grant_room(self.state, self._out)


def finish_reason(spec: LegSpec, index: int, token: int, full: bool) -> FinishReason | None:
    """Whether output token `index` ends its choice; `full` when the context has no further room."""
    sampling = spec.sampling
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    if token in spec.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP
    if index + 1 >= sampling.max_tokens or full:
        return FinishReason.LENGTH
    return None
