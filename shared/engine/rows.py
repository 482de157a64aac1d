"""Who gets which tokens of a step: streams first, then prompts."""

from __future__ import annotations

from kvrelay.shared.engine.plan import PlannedRow
from kvrelay.shared.engine.state import EngineState, Leg


def share_out(state: EngineState, budget_tokens: int) -> tuple[list[PlannedRow], list[Leg], int]:
    """Rows of the legs that are one token from their next, the others, and the tokens left.

    At least a block of tokens is left: many streams must not starve the prompts either. Where the
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
    left = max(budget_tokens - len(decodes), floor) if decodes else budget_tokens
    return [row_for(leg, 1) for leg in decodes], chunks, left


def take_turns(decodes: list[Leg], count: int, step: int) -> list[Leg]:
    """`count` of them, those whose last turn is longest ago first."""
    chosen = sorted(decodes, key=lambda leg: leg.turn)[:count]
    for leg in chosen:
        leg.turn = step
    return chosen


def chunk_rows(chunks: list[Leg], left: int) -> list[PlannedRow]:
    """The next tokens of prompts that are being computed, as many as the budget holds."""
    rows = []
    for leg in chunks:
        if left == 0:
            break
        count = min(leg.pending, left)
        rows.append(row_for(leg, count))
        left -= count
    return rows


def tokens_of(rows: list[PlannedRow]) -> int:
    return sum(len(row.tokens) for row in rows)


def row_for(leg: Leg, count: int) -> PlannedRow:
    """The next `count` tokens of the leg; the last known one is sampled from."""
    index = leg.outputs
    sampling = leg.spec.sampling
    banned: tuple[int, ...] = ()
    if index < sampling.min_tokens:
        banned = tuple(dict.fromkeys(leg.spec.eos_token_ids + sampling.stop_token_ids))
    return PlannedRow(
        key=leg.key,
        tokens=leg.known[leg.computed : leg.computed + count],
        start=leg.computed,
        blocks=leg.blocks,
        sample=count == leg.pending,
        sampling=sampling,
        choice=leg.spec.choice,
        index=index,
        banned=banned,
    )
