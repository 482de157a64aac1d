"""Waiting legs in order of rank. What is looked at costs the same however many wait behind it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvrelay.shared.types import LegRef

if TYPE_CHECKING:
    from kvrelay.shared.engine.state import Leg

Rank = tuple[int, int, int]
"""(0 after a loss of memory or of a worker, 1 for a newcomer; the policy's; order of arrival)."""

LAST: Rank = (2, 0, 0)
"""After every leg."""


class LegQueue:
    """Each leg once, by its rank; the smallest is the best."""

    def __init__(self) -> None:
        # The best lies at the end, where taking it moves nothing.
        self._ranks: list[Rank] = []
        self._legs: dict[Rank, Leg] = {}
        self._rank_of: dict[LegRef, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, leg: Leg, rank: Rank) -> None:
        assert leg.ref not in self._rank_of, f"{leg.key} waits already"
        mirrored = mirror(rank)
        insort(self._ranks, mirrored)
        self._legs[mirrored] = leg
        self._rank_of[leg.ref] = mirrored

    def discard(self, leg: Leg) -> None:
        """Take the leg out, if it is here."""
        mirrored = self._rank_of.pop(leg.ref, None)
        if mirrored is not None:
            del self._ranks[bisect_left(self._ranks, mirrored)]
            del self._legs[mirrored]

    def walk(self) -> Iterator[Leg]:
        """The best first. The leg that was just handed out may be taken out meanwhile."""
        at = len(self._ranks)
        while at > 0:
            at -= 1
            yield self._legs[self._ranks[at]]

    @property
    def head(self) -> Leg | None:
        return self._legs[self._ranks[-1]] if self._ranks else None


def mirror(rank: Rank) -> Rank:
    return (-rank[0], -rank[1], -rank[2])
