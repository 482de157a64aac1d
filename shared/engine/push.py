"""Prefill's side of a handoff: which blocks leave after which step."""

from __future__ import annotations

from kvrelay.shared.engine.messages import Push
from kvrelay.shared.engine.state import EngineLimits, Leg
from kvrelay.shared.intmath import cdiv


def push(leg: Leg, limits: EngineLimits, *, last: bool) -> list[Push]:
    """Hand the relay what is finished: whole blocks after a chunk, the rest at the end."""
    size = limits.block_size
    end = leg.computed if last else leg.computed - leg.computed % size
    pushes = []
    while leg.pushed_tokens < end:
        first = leg.pushed_tokens // size
        stop = min(cdiv(end, size), first + limits.max_chunk_blocks)
        skip = first - leg.first_missing // size
        upto = min(end, stop * size)
        final = last and upto == leg.computed
        pushes.append(
            Push(
                ref=leg.ref,
                chunk=leg.chunks,
                start=leg.pushed_tokens,
                end=upto,
                blocks=tuple(leg.blocks[first:stop]),
                run_blocks=cut_runs(leg.run_blocks, skip, stop - first),
                last=final,
                token=leg.known[-1] if final else -1,
                index=leg.outputs - 1 if final else 0,
            )
        )
        leg.pushed_tokens = upto
        leg.chunks += 1
        leg.pushes += 1
    return pushes


def cut_runs(runs: tuple[int, ...], skip: int, count: int) -> tuple[int, ...]:
    """The part of `runs` that covers blocks [skip, skip + count)."""
    cut = []
    for run in runs:
        taken = min(max(run - skip, 0), count)
        if taken:
            cut.append(taken)
        skip, count = max(skip - run, 0), count - taken
    return tuple(cut)
