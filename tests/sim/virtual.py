"""An event loop whose clock jumps to the next timer as soon as nothing else can run.

Hours of deadlines pass in milliseconds, and the same seed gives the same order of everything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """Nothing can run and no timer is set: somebody waits for ever."""


class _Selector(selectors.SelectSelector):
    """Passes virtual time instead of waiting."""

    advance: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Stuck("no event is ready and no timer is set")
        self.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._virtual_s = 0.0
        selector.advance = self._advance
        self._clock_resolution = 1e-9

    def _advance(self, seconds: float) -> None:
        self._virtual_s += seconds

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Inline: another thread would take real time, which nobody here waits for."""
        future: asyncio.Future[T] = self.create_future()
        future.set_result(func(*args))
        return future


class VirtualClock:
    """A `Clock` over the loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return int(self._loop.time() * 1e9) + 1

    def wall_ns(self) -> int:
        return self.now_ns()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end on a fresh virtual loop; tasks left over are an error."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main())
        left: Sequence[asyncio.Task[Any]] = [t for t in asyncio.all_tasks(loop) if not t.done()]
        assert not left, f"tasks left over: {left}"
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()
