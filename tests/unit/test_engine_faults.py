"""Faults put into pool, cache and scheduler one at a time: the world of the engine finds each."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from tests.sim.engine_world import World

from kvrelay.shared.engine import admission, scheduler, state
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.inflight import Inflight
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.state import EngineState, Leg
from kvrelay.shared.kv.index import Name
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import BlockId, EndReason

LIVES = 60
EVENTS = 300
Fault = Callable[[pytest.MonkeyPatch], None]


def replace(owner: object, name: str, make: Callable[[Any], Any]) -> Fault:
    """The fault: `owner.name` becomes what `make` makes of it."""

    def put(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return put


def leak(release: Any) -> Any:
    return lambda pool, blocks: release(pool, blocks[:-1] if len(blocks) > 3 else blocks)


def double_free(release: Any) -> Any:
    def broken(pool: BlockPool, blocks: Sequence[BlockId]) -> None:
        release(pool, blocks)
        if blocks and blocks[-1] in pool._free:
            heapq.heappush(pool._free, blocks[-1])

    return broken


def missing_hold(share: Any) -> Any:
    def broken(pool: BlockPool, blocks: Iterable[BlockId]) -> None:
        share(pool, [block for block in blocks if pool._refs[block] == 0])

    return broken


def evict_held(evict: Any) -> Any:
    def broken(pool: BlockPool) -> None:
        held = [b for b in range(pool.total) if pool._refs[b] and b not in pool._quarantined]
        if not held:
            return evict(pool)
        if held[0] in pool._index:
            pool._index.remove(held[0])
        pool._refs[held[0]] = 0
        heapq.heappush(pool._free, held[0])

    return broken


def evict_newest(evict: Any) -> Any:
    def broken(pool: BlockPool) -> None:
        pool._idle.move_to_end(next(reversed(pool._idle)), last=False)
        evict(pool)

    return broken


def head_before_tail(release: Any) -> Any:
    return lambda pool, blocks: release(pool, blocks[::-1])


def hash_without_parent(extend: Any) -> Any:
    def broken(
        hashes: list[BlockHash], tokens: Sequence[int], block_size: int, root: BlockHash
    ) -> None:
        for i in range(len(hashes), len(tokens) // block_size):
            own: list[BlockHash] = []
            extend(own, tokens[i * block_size : (i + 1) * block_size], block_size, root)
            hashes += own

    return broken


def name_before_written(announce: Any) -> Any:
    def broken(it: EngineState, leg: Leg) -> None:
        announce(it, leg)
        if leg.phase is not Phase.RESERVING:
            computed, leg.computed = leg.computed, leg.total
            it.name(leg)
            leg.computed = computed

    return broken


def publish_early(handle: Any) -> Any:
    """After the first chunk, whatever is missing."""

    def broken(it: Engine, event: m.Event) -> list[m.Instruction]:
        leg = it.state.legs.get(event.ref) if isinstance(event, m.ChunkArrived) else None
        if leg is None or leg.phase is not Phase.RECEIVING:
            return list(handle(it, event))
        written = leg.blocks[leg.first_missing // it.state.limits.block_size :]
        it.state.pool._quarantined.update(written)
        out = list(handle(it, event))
        if leg.phase is Phase.RECEIVING:
            it.state.pool._quarantined.difference_update(written)
            leg.computed = leg.total
            it.state.name(leg)
            leg.computed = 0
        return out

    return broken


def long_tail(name_tail: Any) -> Any:
    def broken(it: EngineState, leg: Leg) -> None:
        if leg.computed % it.limits.block_size and leg.computed < leg.total:
            leg.computed += 1
        name_tail(it, leg)

    return broken


def no_copies(plan: Any) -> Any:
    def broken(it: EngineState, budget: int) -> Any:
        step, out = plan(it, budget)
        return step and Plan(step.step, step.rows), out

    return broken


def source_not_held(hold: Any) -> Any:
    def broken(it: EngineState, *args: Any, **options: Any) -> Any:
        before = len(it.copies)
        blocks = hold(it, *args, **options)
        it.pool.release([source for source, _ in it.copies[before:]])
        return blocks

    return broken


def deaf(done: Any) -> Any:
    def broken(it: Inflight, writer: Leg, blocks: Iterable[BlockHash]) -> list[Leg]:
        done(it, writer, blocks)
        return []

    return broken


def exchange_without_table(register: Any) -> Any:
    def broken(pool: BlockPool, block: BlockId, name: Name) -> BlockId:
        register(pool, block, name)
        return block

    return broken


def free_while_received(end: Any) -> Any:
    def broken(it: Engine, leg: Leg, *args: Any) -> None:
        if leg.phase is Phase.RECEIVING:
            leg.writer = ""
        end(it, leg, *args)

    return broken


def ends_twice(finish: Any) -> Any:
    def broken(it: Engine, leg: Leg) -> None:
        finish(it, leg)
        if leg.end and leg.end[0] is EndReason.CANCELLED:
            it._out.append(it._out[-1])

    return broken


FAULTS: dict[str, Fault] = {
    "leak": replace(BlockPool, "release", leak),
    "double free": replace(BlockPool, "release", double_free),
    "missing hold on a shared block": replace(BlockPool, "share", missing_hold),
    "eviction of a held block": replace(BlockPool, "_evict", evict_held),
    "eviction of the newest": replace(BlockPool, "_evict", evict_newest),
    "head evicted before its tail": replace(BlockPool, "release", head_before_tail),
    "hash without its parent": replace(state, "extend_hashes", hash_without_parent),
    "named before written": replace(EngineState, "announce", name_before_written),
    "published early": replace(Engine, "handle", publish_early),
    "tail longer than written": replace(EngineState, "name_tail", long_tail),
    "copies left out": replace(scheduler, "plan", no_copies),
    "source of a copy not held": replace(admission, "hold", source_not_held),
    "waiters not woken": replace(Inflight, "done", deaf),
    "given up, but not told": replace(EngineState, "give_up", lambda _: lambda it, leg: None),
    "equal block exchanged, table not": replace(BlockPool, "register", exchange_without_table),
    "freed while a peer writes": replace(Engine, "_end", free_while_received),
    "freed while a step writes": replace(
        EngineState, "steps_with", lambda _: lambda it, leg: False
    ),
    "two ends": replace(Engine, "_finish", ends_twice),
}


def live(lives: int) -> None:
    for seed in range(lives):
        world = World(random.Random(seed))
        for _ in range(EVENTS):
            world.act()
        world.settle()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        live(LIVES)


def test_without_a_fault_nothing_is_found() -> None:
    live(3)
