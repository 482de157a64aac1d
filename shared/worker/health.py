"""Whether an engine is well: it advanced lately, or had nothing to do (L8)."""

from __future__ import annotations

STALL_NS = 400_000_000
"""An engine that has work and made no progress for this long is not well; a renewal's period is a
little longer, so that each asks about the time since the one before."""


class HealthWatch:
    """Pure: told what an engine's counters say, however often or seldom that is asked."""

    def __init__(self) -> None:
        self._turn = self._progress = -1
        self._advanced_ns = 0

    def rested(self, now_ns: int, turn: int) -> None:
        """The engine has nothing to do."""
        self._advanced_ns, self._turn = now_ns, turn

    def well(self, now_ns: int, turn: int, progress: int) -> bool:
        """For an engine with work: it had nothing to do, or advanced, within `STALL_NS`."""
        if turn != self._turn or progress != self._progress:
            self._turn, self._progress, self._advanced_ns = turn, progress, now_ns
        return now_ns - self._advanced_ns < STALL_NS
