"""How many choices may wait for their first token, and when a refused client should try again."""

from __future__ import annotations

from collections import deque

from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import Overloaded

RATE_WINDOW = 64
"""Departures over which the rate is measured."""
KNOWN_AFTER = 16
"""From so many departures on the rate is good enough to refuse by it."""
FORGET_NS = 5_000_000_000
"""After so long at rest, how slow it was before says nothing."""
UNKNOWN_S = 1.0
LONGEST_RETRY_S = 60.0
"""Clients' libraries take no advice to wait longer than a minute."""


class Admission:
    """A bounded queue of legs; `enter` is all or nothing, each `leave` gives one place back.

    It is bounded in number, and in time once the rate of departures is known: who would wait longer
    than `longest_s` is refused now, rather than taken and failed by that deadline later.

    Refused clients are told different times, one departure apart: were all of them told when the
    next place is free, they would come back together, and all but one in vain.
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
        self.waiting = 0

    def enter(self, legs: int) -> None:
        """Raises `Overloaded` with the time after which there should be room."""
        if self.waiting == 0:
            self._begin()
        excess = self.waiting + legs - self._limit
        if excess > 0:
            raise self._refusal(
                legs,
                excess,
                f"{self.waiting} choices wait for their first token and {legs} more would exceed "
                f"the limit of {self._limit}",
            )
        per_leg_s = self._per_leg_s()
        if len(self._departures_ns) >= KNOWN_AFTER and self.waiting * per_leg_s > self._longest_s:
            raise self._refusal(
                legs,
                self.waiting - self._longest_s / per_leg_s,
                f"{self.waiting} choices wait for their first token, which would take about "
                f"{self.waiting * per_leg_s:.0f} s, and the limit is {self._longest_s:g} s",
            )
        self.waiting += legs

    def leave(self) -> None:
        assert self.waiting > 0
        self.waiting -= 1
        self._departures_ns.append(self._busy_ns())
        if self.waiting == 0:
            self._empty_since_ns = self._clock.now_ns()
        if self.waiting <= self._limit // 2:
            self._promised_ns = 0  # whoever comes has room

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

    def _refusal(self, legs: int, excess: float, message: str) -> Overloaded:
        now_ns = self._clock.now_ns()
        per_leg_s = self._per_leg_s()
        if per_leg_s == 0.0:
            return Overloaded(message, retry_after_s=UNKNOWN_S)
        room_ns = now_ns + int(excess * per_leg_s * 1e9)
        after_last_ns = self._promised_ns + int(legs * per_leg_s * 1e9)
        longest_ns = now_ns + int(LONGEST_RETRY_S * 1e9)
        self._promised_ns = min(max(room_ns, after_last_ns), longest_ns)
        return Overloaded(message, retry_after_s=max(0.05, (self._promised_ns - now_ns) / 1e9))
