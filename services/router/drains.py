"""Workers that were told to drain: they get nothing new, and what they run goes on in time.

What has not begun moves at once. What runs may end there in the first half of the time; the rest
is moved one after the other, so that each stream stands still for its own prompt alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.services.router.choreography import Stage
from kvrelay.services.router.policy import LiveWorker
from kvrelay.services.router.running import RunningLeg, RunningRequest

log = logging.getLogger(__name__)

STAY = 0.5
"""Of the time that a worker gives: running answers may end by themselves."""
SPREAD = 0.25
"""Of the same time, after that: they are moved."""
SAME_END_S = 0.1
"""A stream that opens anew tells the same end again, a little earlier or later."""
RETRY_S = 0.5
"""Between two looks for somebody to go on, while there is nobody."""


class Mover(Protocol):
    """Who performs the legs (`Dispatcher`)."""

    def needing(self, worker: str) -> list[tuple[RunningRequest, RunningLeg]]: ...
    def leave(self, running: RunningRequest, leg: RunningLeg, worker: str) -> bool: ...


@dataclass(slots=True)
class Drains:
    """One per router, on its event loop."""

    mover: Mover
    workers: dict[str, float] = field(default_factory=dict)
    """When each will be gone, in the loop's time."""

    def staying(self, workers: Iterable[LiveWorker]) -> list[LiveWorker]:
        """Those that can be given new work."""
        if not self.workers:
            return [*workers]
        return [worker for worker in workers if worker.incarnation not in self.workers]

    def begin(self, worker: str, seconds: float) -> None:
        """It will be there for `seconds` more. Said again, only an earlier end counts."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + seconds
        if ends_s >= self.workers.get(worker, math.inf) - SAME_END_S:
            return
        self.workers[worker] = ends_s
        legs = self.mover.needing(worker)
        log.info("worker %s drains: %d legs in %g s", worker, len(legs), seconds)
        loop.call_later(STAY * seconds, self._move, worker, SPREAD * seconds)
        for running, leg in legs:
            if leg.machine.stage is Stage.QUEUED:
                self.mover.leave(running, leg, worker)

    def over(self, worker: str) -> None:
        """It is gone."""
        self.workers.pop(worker, None)

    def _move(self, worker: str, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        legs = self.mover.needing(worker)
        for number, (running, leg) in enumerate(legs):
            delay_s = number * within_s / len(legs)
            loop.call_later(delay_s, self._leave, running, leg, worker)

    def _leave(self, running: RunningRequest, leg: RunningLeg, worker: str) -> None:
        if not self.mover.leave(running, leg, worker):
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_S, self._leave, running, leg, worker)
