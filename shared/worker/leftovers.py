"""What attempts that are over leave in the transport, let go of once nothing can ask for it.

A chunk whose header was damaged leaves its body unread, and a message that came twice its double.
The body of a stale chunk, on the other hand, may lie there while its header is still to be read: so
an attempt's messages go some time after its end, and only while the lane of its writer waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kvrelay.shared.transfer.protocol import Transport
from kvrelay.shared.transfer.wire import attempt_tags

LINGER_S: Final = 3.0
"""Longer than a body that was begun may take, and what its peer gets after that."""


class Leftovers:
    """Of one receiver, on its event loop."""

    def __init__(self, transport: Transport, reading: Callable[[str], bool]) -> None:
        """`reading`: whether a chunk of that writer is being received now."""
        self._transport = transport
        self._reading = reading
        self._over: deque[tuple[float, str, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def over(self, writer: str, nonce: int) -> None:
        """No chunk of this attempt is wanted any more."""
        self._over.append((asyncio.get_running_loop().time() + LINGER_S, writer, nonce))
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._over.clear()

    def _arm(self) -> None:
        if self._timer is None and self._over:
            self._timer = asyncio.get_running_loop().call_at(self._over[0][0], self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._over and self._over[0][0] <= now_s:
            _, writer, nonce = self._over.popleft()
            if self._reading(writer):
                self._over.append((now_s + LINGER_S, writer, nonce))
            else:
                self._transport.purge(*attempt_tags(nonce))
        self._arm()
