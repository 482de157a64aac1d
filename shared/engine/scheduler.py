"""`plan`: what the next step computes. A function of the state and a budget, nothing else.

One arithmetic: `computed` chases `total`. A chunk of a prompt, a prefix hit, KV that arrived from a
peer and a decode step are the same move. Order of rights to memory: running legs, then preempted
ones, then newcomers above a watermark.
"""

from __future__ import annotations

from kvrelay.shared.engine.admission import admit, ask_for_room, grant_room
from kvrelay.shared.engine.messages import Instruction
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.rows import Allowance, chunk_rows, share_out
from kvrelay.shared.engine.state import EngineState, Leg
from kvrelay.shared.lifecycle import Phase


def plan(state: EngineState, budget: int) -> tuple[Plan | None, list[Instruction]]:
    """The next step (None when nothing can be computed) and what the world must be told.

    Changes phases and the pool it is handed; reads no clock, no socket, no tensor. Legs that are
    one token from their next are always in it; the budget, in tokens that have nobody before them,
    is for what else is computed.
    """
    out: list[Instruction] = []
    preempted = grow_running(state)
    rows, chunks, left = share_out(state, budget)
    state.streams = len(rows)
    fresh = fill(state, chunks, left, out, starting=not preempted)
    state.planned_tokens += len(rows) + sum(len(row.tokens) for row in fresh)
    rows += fresh
    if not preempted:
        grant_room(state, out)
    ask_for_room(state, out)
    if not rows:
        return None, out
    state.step += 1
    state.stepping = Plan(state.step, tuple(rows), tuple(state.copies))
    return state.stepping, out


def fill(
    state: EngineState,
    chunks: list[Leg],
    left: Allowance,
    out: list[Instruction],
    *,
    starting: bool,
) -> list[PlannedRow]:
    """Prompts for what is left of the step: the running ones (`chunks`) and those that start.

    Who starts and ranks before the running ones gets its share before them.
    """
    if not starting or not state.waiting:
        return chunk_rows(chunks, left)
    rows = admit(state, left, out, before=chunks[0].rank) if chunks else []
    rows += chunk_rows(chunks, left)
    return rows + admit(state, left, out)


def grow_running(state: EngineState) -> bool:
    """Blocks for all known tokens of every running leg; whether one was preempted for it."""
    preempted = False
    size = state.limits.block_size
    for leg in tuple(state.running):
        if len(leg.known) <= len(leg.blocks) * size:
            continue
        while leg.phase is Phase.RUNNING:  # unless it was the victim, now or before
            blocks = state.pool.allocate(state.blocks_for(leg.total) - len(leg.blocks))
            if blocks is not None:
                leg.blocks += blocks
                break
            preempt(state, victim(state.running))
            preempted = True
    return preempted


def victim(running: list[Leg]) -> Leg:
    """Of the least urgent legs, one that lost its memory least often, the newest of those.

    So nothing is preempted twice while another like it never was. Prefill's legs hold all they
    need before their first step, and are left alone.
    """
    growing = (leg for leg in running if not leg.handoff)
    return max(growing, key=lambda leg: (leg.spec.priority, -leg.preemptions, leg.arrival))


def preempt(state: EngineState, leg: Leg) -> None:
    """Back to the queue, before all newcomers; its KV is found again in the cache, or recomputed.

    Those of the highest priority come back first, the oldest of them before the others.
    """
    state.running.remove(leg)
    state.name_tail(leg)
    state.give_up(leg)
    state.pool.release(leg.blocks)
    leg.blocks = []
    leg.computed = leg.named_blocks = 0
    leg.prompt_logprobs = []
    leg.preemptions += 1
    state.preemptions += 1
    leg.move(Phase.WAITING)
    leg.rank = (0, leg.spec.priority, leg.arrival)
    state.resuming += 1
    state.enqueue(leg)
