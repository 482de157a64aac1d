"""When refused clients were told to come again, and the places kept for them until they have.

Without that a time told is worth nothing while the load lasts: whoever comes first takes the place,
and of ten times what can be served nine in ten are newcomers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Final

EARLY_S: Final = 1
LATE_S: Final = 2
"""A place is kept from so long before the time told, which is in whole seconds, to so long after:
clients' libraries add some chance to it."""
MOST: Final = 65_536
"""Of legs remembered; who is told a time beyond them comes as a newcomer."""


class Appointments:
    """Clients are known by what they ask. Times are monotonic seconds, counted in whole ones."""

    def __init__(self) -> None:
        self._told: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """By second: legs that should come then, by who."""
        self._legs: Counter[int] = Counter()
        """By second."""

    def make(self, who: Hashable, legs: int, due_s: float) -> None:
        if self._legs.total() >= MOST:
            return
        second = int(due_s)
        self._told[second][hash(who)] += legs
        self._legs[second] += legs

    def keep(self, who: Hashable, legs: int, now_s: float) -> bool:
        """Whether they come when they were told to; what they were told is done with then."""
        self._forget(int(now_s) - LATE_S)
        if not self._told:
            return False  # the usual case, in which a long prompt is not hashed either
        for second in self._about(now_s):
            told = self._told.get(second)
            if told is not None and told[hash(who)] >= legs:
                told[hash(who)] -= legs
                self._legs[second] -= legs
                return True
        return False

    def legs_about(self, now_s: float) -> int:
        """Of those who should come about now, and have not."""
        return sum(self._legs[second] for second in self._about(now_s))

    def clear(self) -> None:
        self._told.clear()
        self._legs.clear()

    def _about(self, now_s: float) -> range:
        return range(int(now_s) - LATE_S, int(now_s) + EARLY_S + 1)

    def _forget(self, before: int) -> None:
        for second in [second for second in self._told if second < before]:
            del self._told[second]
            del self._legs[second]
