"""Hypothesis feeds an engine every event in any order; L4 holds after each, every leg ends once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import LegRef, LegSpec, SamplingParams

BLOCK = 4
BLOCKS = 12
VOCAB = 50


class EngineMachine(RuleBasedStateMachine):
    """The world around one engine: routers, a decode or prefill peer, the relay, the device."""

    legs = Bundle("legs")

    def __init__(self) -> None:
        super().__init__()
        limits = EngineLimits(BLOCK, 4, 8, BLOCK * BLOCKS, VOCAB, b"test")
        self.engine = Engine(limits, BLOCKS)
        self.began: list[LegRef] = []
        self.ended: list[LegRef] = []
        self.asked: list[m.NeedRoom] = []
        self.expected: list[m.Expect] = []
        self.pushed: list[m.Push] = []
        self.forgetting: list[m.Forget] = []
        self.indices: dict[LegRef, int] = {}
        self.running: Plan | None = None

    def note(self, out: list[m.Instruction]) -> None:
        for it in out:
            if isinstance(it, m.Ended):
                self.ended.append(it.ref)
            elif isinstance(it, m.NeedRoom):
                self.asked.append(it)
            elif isinstance(it, m.Expect):
                self.expected.append(it)
            elif isinstance(it, m.Push):
                self.pushed.append(it)
            elif isinstance(it, m.Forget):
                self.forgetting.append(it)
            elif isinstance(it, m.TokenOut):
                assert it.index == self.indices.get(it.ref, 0), "tokens leave in order, once"
                self.indices[it.ref] = it.index + 1

    def spec(self, number: int, prompt: list[int], tokens: int) -> tuple[LegRef, LegSpec]:
        ref = LegRef(f"leg{number}", 0, number)
        self.began.append(ref)
        return ref, LegSpec(ref.leg, tuple(prompt), SamplingParams(max_tokens=tokens))

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
    lengths = st.integers(1, 12)
    owners = st.sampled_from(["a", "b"])

    @rule(target=legs, prompt=prompts, tokens=lengths, owner=owners, handoff=st.booleans())
    def serve(self, prompt: list[int], tokens: int, owner: str, handoff: bool) -> LegRef:
        ref, spec = self.spec(len(self.began), prompt, tokens)
        self.note(self.engine.handle(m.Serve(owner, ref, spec, handoff)))
        return ref

    @rule(target=legs, prompt=prompts, tokens=lengths, owner=owners)
    def reserve(self, prompt: list[int], tokens: int, owner: str) -> LegRef:
        ref, spec = self.spec(len(self.began), prompt, tokens)
        self.note(self.engine.handle(m.Reserve(owner, ref, spec, "P")))
        return ref

    @rule(ref=legs)
    def cancel(self, ref: LegRef) -> None:
        self.note(self.engine.handle(m.Cancel(ref)))

    @rule(ref=legs)
    def published(self, ref: LegRef) -> None:
        self.note(self.engine.handle(m.Published(ref)))

    @rule(owner=owners)
    def router_gone(self, owner: str) -> None:
        self.note(self.engine.handle(m.OwnerGone(owner)))

    @rule(data=st.data())
    def room_granted(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        need = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        leg = self.engine.state.legs.get(need.ref)
        blocks = self.engine.state.blocks_for(leg.total) if leg else 1
        missing = data.draw(st.integers(0, blocks - 1))
        room = m.RoomGranted(need.ref, missing * BLOCK, (blocks - missing,))
        self.note(self.engine.handle(room))

    @rule(data=st.data(), whole=st.booleans())
    def chunk_arrives(self, data: st.DataObject, whole: bool) -> None:
        if not self.expected:
            return
        x = self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))
        end = x.total if whole else data.draw(st.integers(x.first_missing + 1, x.total))
        last = end == x.total
        self.note(self.engine.handle(m.ChunkArrived(x.ref, x.first_missing, end, last, 1)))

    @rule(data=st.data(), error=st.sampled_from([None, "lost"]))
    def push_done(self, data: st.DataObject, error: str | None) -> None:
        if self.pushed:
            push = self.pushed.pop(data.draw(st.integers(0, len(self.pushed) - 1)))
            self.note(self.engine.handle(m.PushDone(push.ref, error)))

    @rule()
    def relay_fails(self) -> None:
        if self.expected:
            self.note(self.engine.handle(m.RelayFailed(self.expected.pop().ref, "corrupt")))

    @rule()
    def forgotten(self) -> None:
        if self.forgetting:
            self.note(self.engine.handle(m.Forgotten(self.forgetting.pop(0).ref)))

    @rule(budget=st.integers(1, 8))
    def step_begins(self, budget: int) -> None:
        if self.running is None:
            self.running, out = self.engine.plan(budget)
            self.note(out)

    @rule(token=st.integers(0, 2), fails=st.integers(0, 9))
    def step_ends(self, token: int, fails: int) -> None:
        """Other events may have come while the step ran."""
        if self.running is None:
            return
        plan, self.running = self.running, None
        if fails == 0:
            self.note(self.engine.fail_step(plan, "broken"))
        else:
            sampled = {row.key: token for row in plan.rows if row.sample}
            self.note(self.engine.complete(plan, StepResult(plan.step, sampled)))

    @invariant()
    def law_holds(self) -> None:
        self.engine.state.check()
        assert len(set(self.ended)) == len(self.ended), "a leg ended twice"
        assert set(self.ended).isdisjoint(self.engine.state.legs)
        assert len(self.ended) + len(self.engine.state.legs) == len(self.began)

    def teardown(self) -> None:
        """Whatever happened, everything ends and every block comes back."""
        self.router_gone("a")
        self.router_gone("b")
        while self.forgetting:
            self.forgotten()
        for push in self.pushed:
            self.note(self.engine.handle(m.PushDone(push.ref)))
        counts = self.engine.state.pool.counts()
        assert self.engine.state.legs == {} and sorted(self.ended, key=str) == sorted(
            self.began, key=str
        )
        assert counts.free + counts.cached_idle == counts.total


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
