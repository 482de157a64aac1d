"""How a worker goes: told to, it tells its routers, and waits until nothing is left with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvrelay.shared.clock import Clock

LOOK_S = 0.05
"""Between two looks whether anything is left: its routers move it, and no one event is the last."""


class Drain:
    """Begun once; on the worker's event loop."""

    def __init__(self, clock: Clock, budget_s: float) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._ends_ns = 0
        self._begun = asyncio.Event()
        self._hurry = asyncio.Event()

    def begin(self, budget_s: float | None = None) -> bool:
        """Whether that sets the end: a later one than there is does not."""
        budget_s = self._budget_s if budget_s is None else budget_s
        ends_ns = self._clock.now_ns() + int(budget_s * 1e9)
        if self._begun.is_set() and ends_ns >= self._ends_ns:
            return False
        self._ends_ns = ends_ns
        self._begun.set()
        return True

    def hurry(self) -> None:
        """End now, whatever is left."""
        self._hurry.set()
        self.begin(0.0)

    @property
    def remaining_ms(self) -> int | None:
        """None before it has begun."""
        if not self._begun.is_set():
            return None
        return max(0, self._ends_ns - self._clock.now_ns()) // 1_000_000

    async def begun(self) -> None:
        await self._begun.wait()

    async def wait(self, legs: Callable[[], int]) -> int:
        """Until no legs are left, the time is up, or it must be quick; how many there were then."""
        while (left := legs()) and self.remaining_ms and not self._hurry.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hurry.wait()
        return left
