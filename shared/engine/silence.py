"""Which legs have waited for others for too long: a worker's own deadline, when nobody tells it."""

from __future__ import annotations

from kvrelay.shared.engine.state import EngineState, Leg
from kvrelay.shared.lifecycle import QUIET_MS


def silent(state: EngineState, passed_ms: int) -> list[Leg]:
    """Those past the limit of their phase. Called at each look: what a leg heard since the last one
    shows in its phase, its chunks that came, or those that left, and it begins anew then."""
    found = []
    for leg in state.legs.values():
        limit_ms = QUIET_MS.get(leg.phase)
        if limit_ms is None:
            leg.quiet = None
            continue
        at = (leg.phase, leg.received, leg.pushes)
        if leg.quiet != at:
            leg.quiet, leg.quiet_ms = at, 0
            continue
        leg.quiet_ms += passed_ms
        if leg.quiet_ms >= limit_ms:
            found.append(leg)
    return found
