"""An ordered channel of messages between a router and a worker, with faults in it.

gRPC neither loses nor reorders a message of a stream, so most of this is harsher than life: what
must hold is that every request still ends once, by a deadline where it comes to that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.chaos.plan import Fault, Step

T = TypeVar("T")


class FaultyChannel(Generic[T]):
    """`put` passes each message to `deliver`, now or later; all on one event loop."""

    def __init__(
        self, chaos: Chaos, step_of: Callable[[T], Step | None], deliver: Callable[[T], None]
    ) -> None:
        self._chaos = chaos
        self._step_of = step_of
        self._deliver = deliver
        self._queue: deque[T] = deque()
        """What waits behind a message that is late."""
        self._late = False
        self._aside: deque[T] = deque()
        """What the next message overtakes."""

    def put(self, message: T) -> None:
        step = self._step_of(message)
        hit = self._chaos.at(step) if step is not None else None
        if hit is None:
            self._in_order(message)
        elif hit.fault is Fault.DUPLICATE:
            self._in_order(message)
            self._in_order(message)
        elif hit.fault is Fault.DELAY:
            self._queue.append(message)
            if not self._late:
                self._late = True
                asyncio.get_running_loop().call_later(hit.delay_s, self._caught_up)
        elif hit.fault is Fault.REORDER:
            self._aside.append(message)
            asyncio.get_running_loop().call_later(hit.delay_s, self._join)

    def _in_order(self, message: T) -> None:
        if self._late:
            self._queue.append(message)
            return
        self._deliver(message)
        self._join()

    def _caught_up(self) -> None:
        self._late = False
        while self._queue:
            self._deliver(self._queue.popleft())
        self._join()

    def _join(self) -> None:
        while self._aside:
            self._deliver(self._aside.popleft())
