"""What an engine holds, for `kvrelay audit`: asked as an event, so that nothing moves meanwhile."""

from __future__ import annotations

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.state import EngineState


def audited(state: EngineState, number: int) -> m.Audited:
    """O(blocks): some milliseconds for ten thousand."""
    pool = state.pool
    return m.Audited(
        number=number,
        legs=tuple(
            m.AuditedLeg(leg.ref, leg.owner, leg.phase, len(leg.blocks), leg.pushes)
            for leg in state.legs.values()
        ),
        pool=pool.counts(),
        holds=sum(pool.holders().values()),
        waiting=len(state.waiting) + len(state.reserving),
        running=len(state.running) + state.receiving,
        shared=len(state.inflight),
        problem=problem(state),
        digests=b"".join(sorted(pool.digests())).hex(),
    )


def problem(state: EngineState) -> str:
    """What is wrong with pool, legs or queues (L4), in words; empty when nothing is."""
    try:
        state.check()
    except AssertionError as error:
        return str(error).splitlines()[0] if str(error) else "a queue and the legs do not agree"
    return ""
