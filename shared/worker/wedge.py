"""Looks after the engine while it has work: a wedged one is told to the routers at once.

Leases would tell them, too, but later, and not while Redis is away. At rest nothing wakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvrelay.shared.clock import Clock
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.worker.health import LOOK_NS, WEDGED_NS, WedgeWatch

log = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")


def waited_for_processors_ns() -> int:
    """By all threads of this process, ever; 0 where the system does not say."""
    total_ns = 0
    for thread in _THREADS.glob("*/schedstat"):
        with suppress(OSError, ValueError):  # it ended meanwhile
            total_ns += int(thread.read_text().split()[1])
    return total_ns


class WedgeGuard:
    """Of one incarnation, on its event loop. `on_change` hears whether the engine makes progress,
    whenever that changes."""

    def __init__(
        self, engine: EngineLoop, clock: Clock, on_change: Callable[[bool], object]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_change = on_change
        self._watch = WedgeWatch()
        self._waited_ns = 0
        """At the last look; 0 while it does not matter."""
        self._work = asyncio.Event()
        self._tasks = TaskSet()
        self._tasks.spawn(self._run())

    def work_came(self) -> None:
        """The engine was, or is about to be, given something to do."""
        self._work.set()

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            idle = self._look()
            while not idle:
                await asyncio.sleep(LOOK_NS / 1e9)  # the pace of looking
                idle = self._look()

    def _look(self) -> bool:
        """Whether the engine is idle."""
        engine, before = self._engine, self._watch.wedged
        idle, starved_ns = engine.idle, 0
        if self._watch.stalls:  # reading it costs more than a look
            waited_ns, self._waited_ns = self._waited_ns, waited_for_processors_ns()
            starved_ns = max(self._waited_ns - waited_ns, 0) if waited_ns else 0
        else:
            self._waited_ns = 0
        self._watch.look(
            self._clock.now_ns(),
            engine.turns.value,
            engine.progress,
            idle=idle,
            starved_ns=starved_ns,
        )
        if self._watch.wedged != before:
            if self._watch.wedged:
                log.error("the engine makes no progress since %.1f s", WEDGED_NS / 1e9)
            else:
                log.info("the engine makes progress again")
            self._on_change(not self._watch.wedged)
        return idle
