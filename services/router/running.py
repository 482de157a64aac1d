"""One request on its way: its legs, and the events that wait for its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.services.router.choreography import LegMachine, Stage
from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.observe import RequestWatch
from kvrelay.services.router.prompts_told import PromptsTold
from kvrelay.services.router.route import Route
from kvrelay.services.router.why import timing_ms
from kvrelay.shared.errors import DeadlineExceeded, KvrelayError
from kvrelay.shared.types import ValidRequest

BUFFERED_TOKENS = 8192
"""Most tokens that wait for one slow reader; beyond it the request is cancelled."""


@dataclass(slots=True, eq=False)
class RunningLeg:
    machine: LegMachine
    timer: asyncio.TimerHandle | None = None
    choosing: asyncio.Task[None] | None = None
    route: Route | None = None
    waits: bool = False
    """Workers were chosen and no token has come from them."""
    queued: bool = True
    """No token of it has come yet."""


class Conductor(Protocol):
    """Who performs the legs of a request (`Dispatcher`)."""

    def stop_leg(self, running: RunningRequest, number: int) -> None: ...
    def end(self, running: RunningRequest, error: KvrelayError | None) -> None: ...


class RunningRequest:
    """A `Generation`: made by `Dispatcher.generate`, read by one consumer."""

    def __init__(self, conductor: Conductor, request: ValidRequest, watch: RequestWatch) -> None:
        self.request = request
        self.watch = watch
        self.legs: list[RunningLeg] = []
        self.open_legs = len(request.legs)
        self.group = ""
        """Of the workers that compute it: others might write another answer."""
        self._conductor = conductor
        self._events: asyncio.Queue[TokenEvent | KvrelayError | None] = asyncio.Queue()
        self._prompts = PromptsTold(request.legs)
        self._most = BUFFERED_TOKENS
        self._over = False

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[TokenEvent]:
        while (item := await self._events.get()) is not None:
            if isinstance(item, KvrelayError):
                raise item
            yield item

    @property
    def untouched(self) -> bool:
        """No worker has any of it, and its client has nothing either."""
        machines = [leg.machine for leg in self.legs]
        return all(m.stage is Stage.CHOOSING and not m.tokens for m in machines)

    @property
    def cached_tokens(self) -> int:
        return self.watch.cached_tokens

    def timing_ms(self) -> dict[str, float]:
        return timing_ms(self.watch.flight.record())

    def stop_leg(self, leg: int) -> None:
        self._conductor.stop_leg(self, leg)

    async def aclose(self) -> None:
        self._conductor.end(self, None)

    def emit(self, event: TokenEvent) -> None:
        if self._events.qsize() >= self._most:
            slow = DeadlineExceeded(f"the client left {BUFFERED_TOKENS} tokens unread")
            self._conductor.end(self, slow)
            return
        ready = self._prompts.take(event)
        if len(ready) > 1:  # others were kept behind it, which is no fault of the reader
            self._most = BUFFERED_TOKENS + len(ready)
        for one in ready:
            self.watch.token(one.leg)
            self._events.put_nowait(one)

    def conclude(self, error: KvrelayError | None) -> bool:
        """The one end, after everything emitted; False when it was over already."""
        if self._over:
            return False
        self._over = True
        self._events.put_nowait(error)
        return True
