"""`plan`: what the next step computes. A function of the state and a token budget, nothing else.

One arithmetic: `computed` chases `total`. A chunk of a prompt, a prefix hit, KV that arrived from a
peer and a decode step are the same move. Order of rights to memory: running legs, then preempted
ones, then newcomers above a watermark.
"""

from __future__ import annotations

from kvrelay.shared.engine.messages import Expect, Instruction, NeedRoom, Room, Started
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.state import EngineState, Leg
from kvrelay.shared.kv.runs import run_lengths
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import BlockId

ASK_AHEAD_STEPS = 2
"""Prefill asks for room this many steps of tokens ahead, so that the answer is there in time."""


def plan(state: EngineState, budget_tokens: int) -> tuple[Plan | None, list[Instruction]]:
    """The next step (None when nothing can be computed) and what the world must be told.

    Changes phases and the pool it is handed; reads no clock, no socket, no tensor.
    """
    out: list[Instruction] = []
    preempted = grow_running(state)
    rows = chunk_running(state, budget_tokens)
    if state.waiting or state.reserving:
        if not preempted:
            left = budget_tokens - sum(len(row.tokens) for row in rows)
            rows += admit(state, left, out)
            grant_room(state, out)
        ask_for_room(state, out)
    if not rows:
        return None, out
    state.step += 1
    return Plan(state.step, tuple(rows)), out


def grow_running(state: EngineState) -> bool:
    """Blocks for all known tokens of every running leg; the newest yields to the oldest."""
    preempted = False
    size = state.limits.block_size
    position = 0
    while position < len(state.running):
        leg = state.running[position]
        missing_tokens = leg.total - len(leg.blocks) * size
        if missing_tokens > 0:
            blocks = state.pool.allocate(state.blocks_for(missing_tokens))
            if blocks is None:
                preempt(state, state.running[-1])
                preempted = True
                continue  # the same leg again, unless it was the victim itself
            leg.blocks += blocks
        position += 1
    return preempted


def preempt(state: EngineState, leg: Leg) -> None:
    """Back to the front of the queue; its KV is recomputed (or found again in the cache)."""
    assert not leg.handoff, "prefill holds all it needs before its first step"
    state.running.remove(leg)
    state.pool.release(leg.blocks)
    leg.blocks = []
    leg.computed = leg.named_blocks = 0
    leg.preemptions += 1
    state.preemptions += 1
    leg.move(Phase.WAITING)
    state.waiting.appendleft(leg)


def chunk_running(state: EngineState, budget_tokens: int) -> list[PlannedRow]:
    """Share the budget: legs that are one token from their next first, then prompts in order."""
    rows: list[PlannedRow] = []
    left = budget_tokens
    for leg in sorted(state.running, key=lambda leg: leg.pending > 1):
        if left == 0:
            break
        count = min(leg.pending, left)
        rows.append(row_for(leg, count))
        left -= count
    return rows


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


def margin_blocks(state: EngineState) -> int:
    """What newcomers must leave free; nothing when nobody else is here to need it."""
    return state.limits.watermark_blocks if state.running or state.receiving else 0


def fits(state: EngineState, hits: list[BlockId], new_blocks: int) -> bool:
    room = state.pool.available - state.pool.idle_among(hits)
    return room - new_blocks >= margin_blocks(state)


def admit(state: EngineState, left: int, out: list[Instruction]) -> list[PlannedRow]:
    """Start waiting legs, oldest first, each with all the blocks it needs or not at all."""
    rows = []
    kept: list[Leg] = []
    while state.waiting and left > 0:
        if len(state.running) + state.receiving >= state.limits.max_num_seqs:
            break
        leg = state.waiting.popleft()
        if leg.handoff and leg.phase is not Phase.READY:
            kept.append(leg)  # waits for room at decode; nobody waits behind it
            continue
        hits = state.cached_prefix(leg)
        lacking = state.blocks_for(leg.total) - len(hits)
        if not fits(state, hits, lacking):
            kept.append(leg)
            break
        start(state, leg, hits, lacking, out)
        count = min(leg.pending, left)
        rows.append(row_for(leg, count))
        left -= count
    state.waiting.extendleft(reversed(kept))
    return rows


def start(
    state: EngineState, leg: Leg, hits: list[BlockId], lacking: int, out: list[Instruction]
) -> None:
    state.pool.share(hits)
    blocks = state.pool.allocate(lacking)
    assert blocks is not None, "checked by fits()"
    leg.blocks = hits + blocks
    leg.named_blocks = len(hits)
    leg.computed = len(hits) * state.limits.block_size
    state.cache_hit_tokens += leg.computed
    state.cache_miss_tokens += leg.pending
    leg.move(Phase.RUNNING)
    state.running.append(leg)
    if not leg.started:
        leg.started = True
        out.append(Started(leg.owner, leg.ref, leg.computed))


def grant_room(state: EngineState, out: list[Instruction]) -> None:
    """Answer reservations, oldest first, all or nothing; legs that lost their memory come first."""
    while state.reserving and not state.waiting:
        if len(state.running) + state.receiving >= state.limits.max_num_seqs:
            return
        leg = state.reserving[0]
        hits = state.cached_prefix(leg)
        lacking = state.blocks_for(leg.total) - len(hits)
        if not fits(state, hits, lacking):
            return
        state.reserving.popleft()
        state.pool.share(hits)
        blocks = state.pool.allocate(lacking, quarantined=True)
        assert blocks is not None, "checked by fits()"
        leg.blocks = hits + blocks
        leg.named_blocks = len(hits)
        leg.first_missing = leg.received = len(hits) * state.limits.block_size
        state.cache_hit_tokens += leg.first_missing
        leg.move(Phase.RECEIVING)
        state.receiving += 1
        out.append(
            Expect(
                leg.ref,
                leg.writer,
                leg.first_missing,
                leg.total,
                state.limits.block_size,
                tuple(blocks),
            )
        )
        out.append(Room(leg.owner, leg.ref, leg.first_missing, tuple(run_lengths(blocks))))


def ask_for_room(state: EngineState, out: list[Instruction]) -> None:
    """Ask decode for the legs that start soon and no others: what queues holds nothing."""
    window = ASK_AHEAD_STEPS * state.limits.max_num_batched_tokens
    asked = 0
    for leg in state.waiting:
        if asked >= window:
            return
        asked += leg.total
        if leg.handoff and leg.phase is Phase.WAITING:
            leg.move(Phase.ASKING)
            out.append(NeedRoom(leg.owner, leg.ref))
