"""When refused clients were told to come again, and the places kept for them until they have.

Without that a time told is worth nothing while the load lasts: whoever comes first takes the place,
and of ten times what can be served nine in ten are newcomers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

EARLY_S: Final = 1
LATE_S: Final = 2
"""A client comes when told to from so long before, for times are told in whole seconds, to so long
after, for clients' libraries add some chance."""
LONGEST_S: Final = 60
"""OpenAI's libraries heed no advice to wait longer. Whose turn is later comes then, to be told
again, and keeps its turn."""
MOST: Final = 65_536
"""Of legs remembered; who is told a time beyond them comes as a newcomer."""


@dataclass(slots=True)
class Turn:
    """Of one request, with so many legs."""

    second: int
    legs: int
    over: bool = False
    """It came, or had its time."""


class Appointments:
    """Clients are known by what they ask. Times are monotonic seconds, counted in whole ones."""

    def __init__(self) -> None:
        self._told: defaultdict[int, defaultdict[int, list[Turn]]]
        self._told = defaultdict(lambda: defaultdict(list))
        """By the seconds they may come at, by who."""
        self._legs: Counter[int] = Counter()
        """Whose turn it is, by second."""

    def make(self, who: Hashable, legs: int, now_s: float, turn_s: float) -> None:
        if self._legs.total() >= MOST:
            return
        turn = Turn(int(turn_s), legs)
        for second in {turn.second, int(min(turn_s, now_s + LONGEST_S))}:
            self._told[second][hash(who)].append(turn)
        self._legs[turn.second] += legs

    def came(self, who: Hashable, legs: int, now_s: float) -> int | None:
        """The second of their turn if they come when they were told to; it is done with then."""
        self._forget(int(now_s) - LATE_S)
        if not self._told:
            return None  # the usual case, in which a long prompt is not hashed either
        for second in _about(now_s):
            turns = self._told[second].get(hash(who), []) if second in self._told else []
            for turn in turns:
                if turn.legs == legs and not turn.over:
                    self._end(turn)
                    return turn.second
        return None

    def legs_about(self, now_s: float) -> int:
        """Of those whose turn it is about now, and who have not come."""
        return sum(self._legs[second] for second in _about(now_s))

    def clear(self) -> None:
        self._told.clear()
        self._legs.clear()

    def _forget(self, before: int) -> None:
        for second in [second for second in self._told if second < before]:
            for turns in self._told.pop(second).values():
                for turn in turns:
                    if turn.second == second and not turn.over:
                        self._end(turn)

    def _end(self, turn: Turn) -> None:
        turn.over = True
        self._legs[turn.second] -= turn.legs
        if not self._legs[turn.second]:
            del self._legs[turn.second]


def is_turn(turn: int, now_s: float) -> bool:
    """Not only about now: who was told to come again, and again, is not put off for being late."""
    return turn <= int(now_s) + EARLY_S


def _about(now_s: float) -> range:
    return range(int(now_s) - LATE_S, int(now_s) + EARLY_S + 1)
