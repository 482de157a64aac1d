"""Who starts: room in the pool is given all or nothing, to the best ranked that fits.

A newcomer that does not fit lets others pass, but not for ever; one whose prefix another leg is
writing waits for that. Legs that lost their memory, and those whose peer was lost, come before all
newcomers: so a retry finds again what its last attempt had reserved. How many legs wait makes no
difference to what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.shared.engine.messages import Expect, Instruction, NeedRoom, Room, Started
from kvrelay.shared.engine.plan import PlannedRow
from kvrelay.shared.engine.queue import LAST, LegQueue, Rank
from kvrelay.shared.engine.rows import Allowance
from kvrelay.shared.engine.state import EngineState, Hit, Leg
from kvrelay.shared.kv.runs import run_lengths
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import BlockId

ASK_AHEAD_STEPS = 2
"""Prefill asks for room this many steps of tokens ahead, so that the answer is there in time."""
SCAN_LEGS = 16
"""Legs without room that are looked at before the rest of a queue has to wait."""
MAX_PASSED = 16
"""So often a leg without room is passed by; then nobody behind it starts before it does."""
LEGS_PER_SPARE_BLOCK = 2
"""One block is kept for so many running legs, which grow while a newcomer is let in: it took the
preemptions of 200 legs on a twentieth of their memory from 110 to 37, their computed tokens down by
11 %."""


def margin_blocks(state: EngineState) -> int:
    """What a leg must leave free; nothing when nobody else is here to need it."""
    if not state.running and not state.receiving:
        return 0
    return state.limits.watermark_blocks + len(state.running) // LEGS_PER_SPARE_BLOCK


def fit(state: EngineState, leg: Leg) -> Hit | None:
    """What the leg finds in the cache, if there is room for all the rest."""
    hit = state.cached_prefix(leg)
    lacking = state.blocks_for(leg.total) - len(hit.blocks)
    room = state.pool.available - state.pool.idle_among(hit.blocks)
    room -= lacking + margin_blocks(state)
    if hit.source is not None and room < state.pool.idle_among([hit.source]):
        hit = Hit(hit.blocks)  # to hold what is copied would take the last block
    return hit if room >= 0 else None


def fitting(state: EngineState, queue: LegQueue, before: Rank = LAST) -> Iterator[tuple[Leg, Hit]]:
    """Legs of the queue that have room, the best first. Each must be taken out of the queue."""
    refused: list[Leg] = []
    if state.pool.available <= margin_blocks(state):
        return  # each needs one new block at least
    for leg in queue.walk():
        if leg.rank > before:
            return
        if len(state.running) + state.receiving >= state.limits.max_num_seqs:
            return
        if state.park(leg):
            continue  # waits for a prefix that is on its way; nobody waits behind it
        hit = fit(state, leg)
        if hit is not None:
            for earlier in refused:
                earlier.passed += 1
            yield leg, hit
            if any(map(must_be_next, refused)):
                return
            continue
        refused.append(leg)
        if must_be_next(leg) or len(refused) == SCAN_LEGS:
            return


def must_be_next(leg: Leg | None) -> bool:
    """Whether nobody may start before this leg, though it waits for room."""
    if leg is None:
        return False
    return leg.preemptions > 0 or leg.retried or leg.passed >= MAX_PASSED


def admit(
    state: EngineState, left: Allowance, out: list[Instruction], before: Rank = LAST
) -> list[PlannedRow]:
    """Start waiting legs that rank before `before`, each with all the blocks it needs or not."""
    rows: list[PlannedRow] = []
    if left.spent or (must_be_next(state.reservations.head) and not must_be_next(state.ready.head)):
        return rows
    for leg, hit in fitting(state, state.ready, before):
        start(state, leg, hit, out)
        rows.append(left.take(leg))
        if left.spent:
            break
    return rows


def hold(state: EngineState, leg: Leg, hit: Hit, *, quarantined: bool) -> list[BlockId]:
    """Give the leg its blocks: those found, and the new ones, which are returned."""
    state.pool.share(hit.blocks)
    if hit.source is not None:
        state.pool.share([hit.source])
    lacking = state.blocks_for(leg.total) - len(hit.blocks)
    blocks = state.pool.allocate(lacking, quarantined=quarantined)
    assert blocks is not None, "checked by fit()"
    if hit.source is not None:
        state.copies.append((hit.source, blocks[0]))
    leg.blocks = hit.blocks + blocks
    leg.named_blocks = len(hit.blocks)
    state.announce(leg)
    return blocks


def start(state: EngineState, leg: Leg, hit: Hit, out: list[Instruction]) -> None:
    state.dequeue(leg)
    hold(state, leg, hit, quarantined=False)
    leg.computed = len(hit.blocks) * state.limits.block_size + hit.copied_tokens
    state.cache_hit_tokens += leg.computed
    state.cache_miss_tokens += leg.pending
    leg.move(Phase.RUNNING)
    state.running.append(leg)
    if not leg.started:
        leg.started = True
        out.append(Started(leg.owner, leg.ref, leg.computed))


def grant_room(state: EngineState, out: list[Instruction]) -> None:
    """Answer reservations, all or nothing; legs that lost their memory come first."""
    if not state.reserving or state.resuming or must_be_next(state.ready.head):
        return
    for leg, hit in fitting(state, state.reservations):
        reserve(state, leg, hit, out)


def reserve(state: EngineState, leg: Leg, hit: Hit, out: list[Instruction]) -> None:
    state.dequeue(leg)
    blocks = hold(state, leg, hit, quarantined=True)
    size = state.limits.block_size
    leg.first_missing = leg.received = len(hit.blocks) * size
    state.cache_hit_tokens += leg.first_missing
    leg.move(Phase.RECEIVING)
    state.receiving += 1
    out.append(Expect(leg.ref, leg.writer, leg.first_missing, leg.total, size, tuple(blocks)))
    out.append(Room(leg.owner, leg.ref, leg.first_missing, tuple(run_lengths(blocks))))


def ask_for_room(state: EngineState, out: list[Instruction]) -> None:
    """Ask decode for the legs that start soon and no others: what queues holds nothing.

    What was granted counts for all decode workers together, for it waits for this one engine; what
    was not, for its own alone: one that has no room does not keep the others' legs waiting.
    """
    window = ASK_AHEAD_STEPS * state.limits.max_num_batched_tokens
    passed = 0
    for leg in state.unasked.walk():
        if state.granted_tokens >= window or passed == SCAN_LEGS:
            return
        if state.granted_tokens + state.asking_tokens[leg.reader] >= window:
            passed += 1
            continue
        if state.park(leg):
            continue
        state.unasked.discard(leg)
        state.asking_tokens[leg.reader] += leg.total
        leg.move(Phase.ASKING)
        out.append(NeedRoom(leg.owner, leg.ref))
