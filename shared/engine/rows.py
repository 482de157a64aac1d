"""Who gets which tokens of a step: streams first, then prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from kvrelay.shared.engine.plan import PlannedRow
from kvrelay.shared.engine.state import EngineLimits, EngineState, Leg


@dataclass(slots=True)
class Allowance:
    """How much of prompts a step may still take on.

    Its work is bounded rather than its tokens, for how long it lasts depends on that: late in a
    long prompt a token takes several times as long as early.
    """

    limits: EngineLimits
    tokens: int
    work: int

    @property
    def spent(self) -> bool:
        return self.tokens < 1 or self.work < 1

    def take(self, leg: Leg) -> PlannedRow:
        """The leg's next tokens, as many as it has and this allows; not to be asked when spent.

        Chunks end where blocks do, for these can be relayed, and hold one block at least.
        """
        count = min(leg.pending, self.tokens, self._affordable(leg.computed))
        self.tokens -= count
        self.work -= work_of(leg.computed, count, self.limits.even_context)
        return row_for(leg, count)

    def _affordable(self, start: int) -> int:
        """`work_of(start, count)` is about `work`."""
        even, size = self.limits.even_context, self.limits.block_size
        if not even:
            return self.work
        end = isqrt((start + even) ** 2 + 2 * even * self.work) - even
        next_border = start - start % size + size
        return max((end + size // 2) // size * size, next_border) - start


def work_of(start: int, count: int, even_context: int) -> int:
    """Of `count` tokens behind `start` others, in tokens that have nobody before them."""
    if not even_context:
        return count
    return count + count * (2 * start + count) // (2 * even_context)


def work_of_rows(rows: Sequence[PlannedRow], even_context: int) -> int:
    """A token of a stream counts as one: its step's time is not told by its context."""
    return sum(
        work_of(row.start, len(row.tokens), even_context) if len(row.tokens) > 1 else 1
        for row in rows
    )


def share_out(state: EngineState, budget: int) -> tuple[list[PlannedRow], list[Leg], Allowance]:
    """Rows of the legs that are one token from their next, the others, and what is left for these.

    At least a block is left: many streams must not starve the prompts either. Where the
    streams are more than a step can hold, they take turns.
    """
    decodes: list[Leg] = []
    chunks: list[Leg] = []
    for leg in state.running:
        (decodes if leg.pending == 1 else chunks).append(leg)
    chunks.sort(key=lambda leg: leg.rank)
    step_tokens = state.limits.max_num_batched_tokens
    floor = min(state.limits.block_size, step_tokens // 2)
    if len(decodes) > step_tokens - floor:
        decodes = take_turns(decodes, step_tokens - floor, state.step + 1)
    work = max(budget - len(decodes), floor) if decodes else budget
    left = Allowance(state.limits, step_tokens - len(decodes), work)
    return [row_for(leg, 1) for leg in decodes], chunks, left


def take_turns(decodes: list[Leg], count: int, step: int) -> list[Leg]:
    """`count` of them, those whose last turn is longest ago first."""
    chosen = sorted(decodes, key=lambda leg: leg.turn)[:count]
    for leg in chosen:
        leg.turn = step
    return chosen


def chunk_rows(chunks: list[Leg], left: Allowance) -> list[PlannedRow]:
    """The next tokens of prompts that are being computed, as many as are left."""
    rows = []
    for leg in chunks:
        if left.spent:
            break
        rows.append(left.take(leg))
    return rows


def row_for(leg: Leg, count: int) -> PlannedRow:
    """The next `count` tokens of the leg; the last known one is sampled from."""
    index = leg.outputs
    sampling = leg.spec.sampling
    last = count == leg.pending
    banned: tuple[int, ...] = ()
    if index < sampling.min_tokens:
        banned = tuple(dict.fromkeys(leg.spec.eos_token_ids + sampling.stop_token_ids))
    edits = None
    if last and leg.steering is not None:
        banned += leg.steering.banned(leg.known)
        edits = leg.steering.edits(leg.known)
    told: Sequence[int] = ()
    if index == 0 and sampling.prompt_logprobs is not None:
        told = leg.known[leg.computed + 1 : leg.computed + count + 1]
    return PlannedRow(
        key=leg.key,
        tokens=leg.known[leg.computed : leg.computed + count],
        start=leg.computed,
        blocks=leg.blocks,
        sample=last,
        sampling=sampling,
        choice=leg.spec.choice,
        index=index,
        banned=banned,
        edits=edits,
        told=told,
    )
