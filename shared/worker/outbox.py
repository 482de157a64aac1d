"""What waits to be written to one router stream: appended by deliveries, drained whole.

Everything of one engine step leaves in one message. A router that reads nothing is cut off when its
lease ends or the keepalive of its stream fails, so the size is bounded by what its legs produce in
that time.
"""

from __future__ import annotations

import asyncio

from kvrelay.shared.rpc.gen import relay_pb2 as pb


class Outbox:
    """Single consumer; all calls on one event loop."""

    def __init__(self) -> None:
        self._events: list[pb.Event] = []
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, event: pb.Event) -> None:
        self._events.append(event)
        self._filled.set()

    def beat(self) -> None:
        """The router asks whether anybody is here: any message is an answer, an empty one, too."""
        self._filled.set()

    def close(self) -> None:
        """What is left is taken, then nothing. Idempotent."""
        self._closed = True
        self._filled.set()

    async def take(self) -> list[pb.Event] | None:
        """All events since the last call; waits for the first, or a beat.

        None once closed and drained.
        """
        await self._filled.wait()
        events, self._events = self._events, []
        if self._closed:
            return events or None
        self._filled.clear()
        return events
