"""How many choices may wait for their first token, and when a refused client should try again."""

from __future__ import annotations

from collections import deque

from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import Overloaded

RATE_WINDOW = 64
"""Departures over which the rate is measured."""


class Admission:
    """A bounded queue of legs; `enter` is all or nothing, each `leave` gives one place back."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._departures_ns: deque[int] = deque(maxlen=RATE_WINDOW)
        self.waiting = 0

    def enter(self, legs: int) -> None:
        """Raises `Overloaded` with the time that the excess needs to drain at the measured rate."""
        excess = self.waiting + legs - self._limit
        if excess > 0:
            raise Overloaded(
                f"{self.waiting} choices wait for their first token and {legs} more would exceed "
                f"the limit of {self._limit}",
                retry_after_s=self.drain_time_s(excess),
            )
        self.waiting += legs

    def leave(self) -> None:
        assert self.waiting > 0
        self.waiting -= 1
        self._departures_ns.append(self._clock.now_ns())

    def drain_time_s(self, legs: int) -> float:
        """How long `legs` departures take at the recent rate; a second when nothing is known."""
        if len(self._departures_ns) < 2:
            return 1.0
        window_ns = self._clock.now_ns() - self._departures_ns[0]
        return max(0.05, legs * window_ns / 1e9 / len(self._departures_ns))
