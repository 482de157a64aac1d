"""Time as an argument: everything that decides takes a `Clock`, so that tests can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time for deciding, wall time for telling people."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; only differences mean anything."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch; never used to decide anything."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()
