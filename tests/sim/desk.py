"""One engine that computes on the hash-chain memory, and nobody who disturbs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.model import BLOCK, VOCAB, ChainMemory

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import LegRef, LegSpec


@dataclass(slots=True)
class Desk:
    limits: EngineLimits
    blocks: int
    engine: Engine = field(init=False)
    memory: ChainMemory = field(init=False)
    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of each leg that needed no computing when it started."""
    computed_tokens: int = 0
    steps: int = 0
    most_used_blocks: int = 0

    def __post_init__(self) -> None:
        self.engine = Engine(self.limits, self.blocks)
        self.memory = ChainMemory(self.blocks)

    def submit(self, spec: LegSpec) -> None:
        ref = LegRef(spec.leg, 0, len(self.answers))
        self.answers[spec.leg] = []
        self.note(self.engine.handle(m.Serve("router", ref, spec, handoff=False)))

    def step(self, budget: int | None = None) -> Plan | None:
        plan, out = self.engine.plan(budget or self.limits.max_num_batched_tokens)
        self.note(out)
        if plan is not None:
            self.steps += 1
            self.computed_tokens += plan.tokens
            counts = self.engine.state.pool.counts()
            self.most_used_blocks = max(self.most_used_blocks, counts.in_use)
            self.note(self.engine.complete(plan, self.memory.run(plan)))
        return plan

    def finish(self) -> None:
        while self.step() is not None:
            pass
        self.engine.state.check()
        assert not self.engine.state.legs, "nothing can be planned, and somebody waits"

    def note(self, out: list[m.Instruction]) -> None:
        for it in out:
            if isinstance(it, m.TokenOut):
                self.answers[it.ref.leg].append(it.token)
            elif isinstance(it, m.Started):
                self.started.append(it.ref.leg)
                self.cached[it.ref.leg] = it.cached
            elif isinstance(it, m.Ended):
                self.ended.append(it.ref.leg)


def desk(blocks: int, *, seqs: int = 8, batched: int = 64) -> Desk:
    return Desk(EngineLimits(BLOCK, seqs, batched, blocks * BLOCK, VOCAB, b"desk"), blocks)
