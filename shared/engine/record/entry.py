"""One call of an engine as a record has it: what it was asked, and the mark of what came of it.

What is asked is kept whole, for it is all that a replay needs. The answer is kept as counts and
checksums, by kind of thing, so that a replay that goes another way can say what differs.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

from pydantic import TypeAdapter

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult

# ---- asked ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handle:
    """`handle(event)`."""

    event: m.Event


@dataclass(frozen=True, slots=True)
class MakePlan:
    """`plan(budget)`."""

    budget: int


@dataclass(frozen=True, slots=True)
class Complete:
    """`complete` of the plan that was made last."""

    drawn: tuple[int | str | None, ...]
    """By row of the plan: its token, why it has none, or None where none was asked for.

    A token that completes its answer is its bitwise complement here: a number below 0.
    """

    @staticmethod
    def of(plan: Plan, result: StepResult) -> Complete:
        sampled, failed = result.sampled, result.failed
        keys = (row.key for row in plan.rows)
        if result.complete:
            sampled = {**sampled, **{key: ~sampled[key] for key in result.complete}}
        if not failed:
            return Complete(tuple([sampled.get(key) for key in keys]))
        return Complete(tuple([failed.get(key, sampled.get(key)) for key in keys]))

    def result(self, plan: Plan) -> StepResult:
        """The result that this was made of. The plan has as many rows as this has."""
        result = StepResult(plan.step)
        for row, drawn in zip(plan.rows, self.drawn, strict=True):
            if isinstance(drawn, str):
                result.failed[row.key] = drawn
            elif drawn is not None:
                if drawn < 0:
                    result.complete.add(row.key)
                result.sampled[row.key] = ~drawn if drawn < 0 else drawn
            if row.told:
                result.prompt_logprobs[row.key] = []
        return result


@dataclass(frozen=True, slots=True)
class FailStep:
    """`fail_step` of the plan that was made last."""

    message: str


Asked: TypeAlias = Handle | MakePlan | Complete | FailStep

# ---- answered ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with its block tables as they were when it was made: legs go on growing theirs."""

    rows: Sequence[PlannedRow]
    tables: Sequence[Sequence[int]]
    copies: Sequence[tuple[int, int]]

    @staticmethod
    def of(plan: Plan) -> Planned:
        return Planned(plan.rows, [tuple(row.blocks) for row in plan.rows], plan.copies)


@dataclass(slots=True)
class Entry:
    """A call as it happened, in values that nobody changes any more."""

    asked: Asked
    planned: Planned | None = None
    out: Sequence[m.Instruction] = ()
    raised: str = ""
    """The exception that it ended with."""


@dataclass(frozen=True, slots=True)
class PlanMark:
    """Three checksums of a plan, the first of which that differs says what kind of fault it is."""

    rows: int
    tokens: int
    legs: str
    """Which legs, in which order."""
    spans: str
    """Which tokens of them, at which positions; which are sampled from, and which are banned."""
    blocks: str
    """Where their KV lies, and which blocks are copied before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mark of an answer. Two answers with the same mark are taken for equal."""

    plan: PlanMark | None = None
    said: dict[str, int] = field(default_factory=dict)
    """How many instructions of each kind."""
    content: str = ""
    """Checksum of all instructions, in order; empty where there are none."""
    raised: str = ""

    def difference(self, now: Outcome) -> str | None:
        """What `now` has that this, the recorded one, has not."""
        if now.raised != self.raised:
            was = f"it raised {self.raised}" if self.raised else "it raised nothing"
            return f"recorded: {was}; now it raises {now.raised or 'nothing'}"
        return plan_difference(self.plan, now.plan) or self._said_otherwise(now)

    def _said_otherwise(self, now: Outcome) -> str | None:
        if now.said != self.said:
            return f"instructions: recorded {counted(self.said)}; now {counted(now.said)}"
        if now.content != self.content:
            return f"instructions: {counted(now.said)} as recorded, with other content"
        return None


def plan_difference(recorded: PlanMark | None, now: PlanMark | None) -> str | None:
    if recorded == now:
        return None
    if (
        recorded is None
        or now is None
        or (recorded.rows, recorded.tokens)
        != (
            now.rows,
            now.tokens,
        )
    ):
        return f"plan: recorded {sized(recorded)}; now {sized(now)}"
    for same, what in (
        (recorded.legs == now.legs, "other legs, or in another order"),
        (recorded.spans == now.spans, "other tokens of the same legs"),
    ):
        if not same:
            return f"plan: {sized(now)} as recorded, but {what}"
    return f"plan: {sized(now)} as recorded, but in other blocks"


def sized(mark: PlanMark | None) -> str:
    return "nothing" if mark is None else f"{mark.rows} rows of {mark.tokens} tokens"


def counted(said: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in said.items()) or "nothing"


def outcome_of(entry: Entry) -> Outcome:
    return Outcome(
        mark_of(entry.planned) if entry.planned is not None else None,
        dict(Counter(type(item).__name__ for item in entry.out)),
        checksum(b"".join(map(_instruction_bytes, entry.out))) if entry.out else "",
        entry.raised,
    )


def mark_of(planned: Planned) -> PlanMark:
    rows = planned.rows
    spans, blocks = array("q"), array("q")
    for row in rows:
        spans.extend((row.start, len(row.tokens), row.sample, row.choice, row.index))
        spans.extend(row.tokens)
        spans.extend((len(row.banned), *row.banned))
    for table in planned.tables:
        blocks.append(len(table))
        blocks.extend(table)
    for pair in planned.copies:
        blocks.extend(pair)
    return PlanMark(
        rows=len(rows),
        tokens=sum([len(row.tokens) for row in rows]),
        legs=checksum("\n".join([row.key for row in rows]).encode()),
        spans=checksum(spans),
        blocks=checksum(blocks),
    )


def checksum(content: bytes | array[int]) -> str:
    return f"{crc32(content):08x}"


_ADAPTERS: dict[type, TypeAdapter[m.Instruction]] = {
    kind: TypeAdapter(kind) for kind in m.Instruction.__args__
}


def _instruction_bytes(item: m.Instruction) -> bytes:
    """Fields at their defaults are left out: one that is new changes no old checksum.

    So are logprobs, which the engine only passes on: they are not recorded.
    """
    kind = type(item)
    content = _ADAPTERS[kind].dump_json(
        item, exclude_defaults=True, exclude={"logprobs", "prompt_logprobs"}
    )
    return kind.__name__.encode() + content
