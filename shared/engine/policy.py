"""In which order waiting legs are admitted: one pure function for each policy; smaller goes first.

Every policy ages what waits. Time is counted in tokens that the engine computed, so that a policy
needs no clock, and the rank of a leg is fixed when it arrives: nothing is sorted again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

PRIORITY_TOKENS = 65_536
"""A leg goes before one of the next lower priority that arrived up to so many tokens earlier."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a policy may look at."""

    at_tokens: int
    """How many tokens the engine had computed when the leg arrived."""
    uncached_tokens: int
    """Of the leg, then: neither cached nor being computed for another leg."""
    priority: int
    """As the client gave it: smaller is more urgent."""


Policy = Callable[[Arrival], int]


def fcfs(arrival: Arrival) -> int:
    """Legs of one rank go in order of arrival, so all have the same."""
    return 0


def priority(arrival: Arrival) -> int:
    """The more urgent first; the less urgent for which enough tokens were computed meanwhile."""
    return arrival.priority * PRIORITY_TOKENS + arrival.at_tokens


def shortest_uncached_first(arrival: Arrival) -> int:
    """The least work first. A leg of n tokens is overtaken only until n tokens were computed."""
    return arrival.uncached_tokens + arrival.at_tokens


POLICIES: Final[Mapping[str, Policy]] = {
    "fcfs": fcfs,
    "priority": priority,
    "shortest-uncached-first": shortest_uncached_first,
}
