"""What waits to be written to one router stream: appended by deliveries, drained whole.

Everything of one engine step leaves in one message, unless it is large. A router that reads nothing
is cut off when its lease ends or the keepalive of its stream fails, so the size is bounded by what
its legs produce in that time.
"""

from __future__ import annotations

import asyncio

from kvrelay.shared.rpc.gen import relay_pb2 as pb


class Outbox:
    """Single consumer; all calls on one event loop."""

    def __init__(self) -> None:
        self._messages: list[list[pb.Event]] = [[]]
        """The last one is still open; the others are full."""
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, event: pb.Event) -> None:
        self._messages[-1].append(event)
        self._filled.set()

    def cut(self) -> None:
        """What comes goes into another message: several that are large do not fit in one."""
        if self._messages[-1]:
            self._messages.append([])

    def beat(self) -> None:
        """The router asks whether anybody is here: any message is an answer, an empty one, too."""
        self._filled.set()

    def close(self) -> None:
        """What is left is taken, then nothing. Idempotent."""
        self._closed = True
        self._filled.set()

    async def take(self) -> list[pb.Event] | None:
        """All events since the last call, up to the first cut; waits for the first, or a beat.

        None once closed and drained.
        """
        await self._filled.wait()
        events = self._messages.pop(0)
        if not self._messages:
            self._messages.append([])
        if self._closed:
            return events or None
        if not self._messages[0]:
            self._filled.clear()
        return events
