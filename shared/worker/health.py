"""Whether an engine is well: it advanced lately, or had nothing to do (L8). Whether a router is."""

from __future__ import annotations

from typing import Final

STALL_NS: Final = 400_000_000
"""An engine that has work and made no progress for this long is not well; a renewal's period is a
little longer, so that each asks about the time since the one before."""
SILENT_BEATS = 4
"""So many beats that do not come make a silent router: one whose loop stands for a second does not
lose its requests."""
LOOK_NS: Final = 100_000_000
"""Time between two looks at an engine that has work."""
WEDGED_NS: Final = 1_200_000_000
"""After so long without progress its routers are told: noticed after 1.4 s at the latest, where
the law says 2 s, and six times what a step is planned to last."""


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


class SilenceWatch:
    """Whether a router that has work here is silent (L7). Pure: told what happens, and when.

    Each stream's router beats as often as it promised, from the very loop that would send a cancel
    and over the very path it would take. Its lease is no such sign: the thread that renews it goes
    on when the loop stands, and nobody can see it while Redis is away. Only time in which this
    process itself was listening counts, for one that stood still has heard nobody.
    """

    def __init__(self, beat_ns: int, now_ns: int) -> None:
        """`beat_ns` is 0 for a router that promised nothing: then it is never silent."""
        self._beat_ns = beat_ns
        self._heard_ns = self._looked_ns = now_ns
        self._listened_ns = 0

    @property
    def tick_ns(self) -> int:
        """How often `silent` is to be asked; 0: never."""
        return self._beat_ns // 2

    @property
    def limit_ns(self) -> int:
        return SILENT_BEATS * self._beat_ns

    def heard(self, now_ns: int) -> None:
        self._heard_ns = now_ns
        self._listened_ns = 0

    def begin(self, now_ns: int) -> None:
        """It has work here from now on: until now it had no reason to say anything."""
        self._looked_ns = now_ns
        self._listened_ns = 0

    def silent(self, now_ns: int) -> bool:
        """Asked every `tick_ns`; what passed beyond two of them did not pass in listening."""
        passed_ns = now_ns - self._looked_ns
        self._looked_ns = now_ns
        self._listened_ns += passed_ns if passed_ns <= 2 * self.tick_ns else self.tick_ns
        return 0 < self.limit_ns <= self._listened_ns

    def here(self, now_ns: int) -> bool:
        """For one that should be saying something: whether it has done so lately."""
        return self.limit_ns == 0 or now_ns - self._heard_ns < self.limit_ns


class WedgeWatch:
    """Pure: whether an engine has stood still for so long that its requests must go on elsewhere.

    Only time that was looked at counts, and that the process had processors in. A look that comes
    late says that the whole process, or the machine, stood still, and threads that wait for a
    processor say that others have it: of that the engine is not to blame, and a lease tells others.
    """

    def __init__(self) -> None:
        self._seen = (-1, -1)
        self._looked_ns = 0
        self._still_ns = 0

    @property
    def wedged(self) -> bool:
        """As of the last look."""
        return self._still_ns >= WEDGED_NS

    @property
    def stalls(self) -> bool:
        """It stands still for so long that it may become wedged."""
        return self._still_ns >= STALL_NS

    def look(
        self, now_ns: int, turn: int, progress: int, *, idle: bool, starved_ns: int = 0
    ) -> None:
        """`starved_ns`: how long its threads waited for processors since the last look."""
        since_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if idle or self._seen != (turn, progress):
            self._seen, self._still_ns = (turn, progress), 0
        else:
            self._still_ns += max(min(since_ns, 2 * LOOK_NS) - starved_ns, 0)
