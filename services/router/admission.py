"""How many choices may wait for their first token, and when a refused client should try again."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from kvrelay.services.router.appointments import Appointments, is_turn
from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import Overloaded

RATE_WINDOW = 64
"""Departures over which the rate is measured."""
KNOWN_AFTER = 16
"""From so many departures on the rate is good enough to refuse by it."""
FORGET_NS = 5_000_000_000
"""After so long at rest, how slow it was before says nothing."""
UNKNOWN_S = 1.0
BOOKED = 0.8
"""So much of what departs is promised to those who were refused: the rest is for newcomers, who
would wait behind all of them otherwise, also when the load is long over."""
NEWCOMER_EVERY = 10
"""So many departures after the last newcomer was let in, the next is though places are kept. With
`BOOKED` that is less than all that departs, so that the queue falls to where newcomers find places
anyway. Else one who comes when the load is over would be refused for as long as those who were
refused before it still come."""
LONGEST_RETRY_S = 600.0
"""Nobody is told to come later."""


class Admission:
    """A bounded queue of legs; `enter` is all or nothing, each `leave` gives one place back.

    It is bounded in number, and in time once the rate of departures is known: who would wait longer
    than `longest_s` is refused now, rather than taken and failed by that deadline later.

    Refused clients are told different times, about a departure apart: were all told when the next
    place is free, they would come back together, and all but one in vain. Who comes when told to
    finds a place: up to half of them are kept from newcomers for those who are due about now, but
    one newcomer in so many departures is let in all the same.
    """

    def __init__(self, limit: int, longest_s: float, clock: Clock) -> None:
        self._limit = limit
        self._longest_s = longest_s
        self._clock = clock
        self._departures_ns: deque[int] = deque(maxlen=RATE_WINDOW)
        """By the clock of `_busy_ns`."""
        self._idle_ns = 0
        """How long nothing waited: no time in which anything could depart."""
        self._empty_since_ns: int | None = clock.now_ns()
        self._promised_ns = 0
        """When the client that was told to come last is to come."""
        self._appointments = Appointments()
        self._since_newcomer = 0
        """Departures; below 0 after a large one that passed by, which counts for several."""
        self.waiting = 0

    def enter(self, legs: int, who: Hashable) -> None:
        """`who`: what the request has in common with itself when it comes again. Raises
        `Overloaded` with the time after which there should be room."""
        if self.waiting == 0:
            self._begin()
        now_s = self._clock.now_ns() / 1e9
        turn = self._appointments.came(who, legs, now_s)
        expected = turn is not None and is_turn(turn, now_s)
        kept = 0 if expected else min(self._appointments.legs_about(now_s), self._limit // 2)
        passes = kept > 0 and self._since_newcomer >= NEWCOMER_EVERY
        if passes:
            kept = 0
        excess = max(float(self.waiting + legs - (self._limit - kept)), 0.0)
        why = f"{legs} more would exceed the limit of {self._limit}"
        if kept:
            why += f", of which {kept} are kept for those who were told to come now"
        per_leg_s = self._per_leg_s()
        waits_s = self.waiting * per_leg_s
        if not excess and len(self._departures_ns) >= KNOWN_AFTER and waits_s > self._longest_s:
            excess = self.waiting - self._longest_s / per_leg_s
            why = f"that takes about {waits_s:.0f} s, and the limit is {self._longest_s:g} s"
        if excess:
            message = f"{self.waiting} choices wait for their first token, and {why}"
            raise Overloaded(message, retry_after_s=self._told_s(legs, who, excess, turn))
        self.waiting += legs
        if not expected:
            self._since_newcomer = NEWCOMER_EVERY * (1 - legs) if passes else 0

    def leave(self) -> None:
        assert self.waiting > 0
        self.waiting -= 1
        self._since_newcomer += 1
        self._departures_ns.append(self._busy_ns())
        if self.waiting == 0:
            self._empty_since_ns = self._clock.now_ns()
        if self.waiting <= self._limit // 4:  # whoever comes has room, those who were told as well
            self._promised_ns = 0
            self._appointments.clear()

    def _begin(self) -> None:
        if self._empty_since_ns is not None:
            idle_ns = self._clock.now_ns() - self._empty_since_ns
            self._idle_ns += idle_ns
            self._empty_since_ns = None
            if idle_ns > FORGET_NS:
                self._departures_ns.clear()

    def _busy_ns(self) -> int:
        return self._clock.now_ns() - self._idle_ns

    def _per_leg_s(self) -> float:
        """Between two departures, lately, while anything waited; 0 when nothing is known."""
        if len(self._departures_ns) < 2:
            return 0.0
        window_ns = self._busy_ns() - self._departures_ns[0]
        return window_ns / 1e9 / (len(self._departures_ns) - 1)

    def _told_s(self, legs: int, who: Hashable, excess: float, turn: int | None) -> float:
        """When to come again, from now. Who came when told to (`turn`) does not queue up anew."""
        now_ns = self._clock.now_ns()
        per_leg_s = self._per_leg_s()
        if per_leg_s == 0.0:
            return UNKNOWN_S
        longest_ns = now_ns + int(LONGEST_RETRY_S * 1e9)
        room_ns = now_ns + int(excess * per_leg_s * 1e9)
        if turn is None:
            after_last_ns = self._promised_ns + int(legs * per_leg_s / BOOKED * 1e9)
            turn_ns = self._promised_ns = min(max(room_ns, after_last_ns), longest_ns)
        else:
            turn_ns = min(max(room_ns, turn * 1_000_000_000), longest_ns)
        told_s = max(0.05, (turn_ns - now_ns) / 1e9)
        if turn_ns < longest_ns:
            self._appointments.make(who, legs, now_ns / 1e9, now_ns / 1e9 + told_s)
        return told_s
