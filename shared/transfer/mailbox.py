"""Matches messages with receives by tag, oldest first, for transports that read by themselves.

A message is an `Arrival` from its header to its last byte. With a receive posted it is filled into
that receive's buffer; without one it is kept here, up to a bound on all bytes kept. Beyond the
bound the reader of the connection has to wait, and with it the sender.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.errors import CorruptFrame, PeerLost, TransferError
from kvrelay.shared.transfer.protocol import Buffer

_SINK_BYTES: Final = 256 * 1024


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive. `done` gets its error, or None, exactly once; then `view` is let go of."""

    owner: object
    """The peer it was posted with: closing that peer fails it."""
    tag: int
    view: memoryview
    done: asyncio.Future[TransferError | None]
    arrival: Arrival | None = None

    def end(self, error: TransferError | None) -> None:
        if self.arrival is not None:
            self.arrival.receive = None
        if not self.done.done():
            self.done.set_result(error)


@dataclass(slots=True, eq=False)
class Arrival:
    """A message that has begun: filled into its receive, kept in `data`, or else dropped."""

    tag: int
    size: int
    source: object = None
    """Who brings it: what is kept of it goes when that is lost."""
    receive: Receive | None = None
    data: bytearray | None = None
    filled: int = 0

    @property
    def complete(self) -> bool:
        return self.filled == self.size

    def target(self) -> memoryview:
        """Where the next bytes of the message go; asked anew before each read."""
        if self.data is not None:
            return memoryview(self.data)[self.filled :]
        if self.receive is not None:
            return self.receive.view[self.filled :]
        return memoryview(bytearray(min(_SINK_BYTES, self.size - self.filled)))


@dataclass(slots=True)
class Mailbox:
    """All posted receives and all kept messages of one transport."""

    limit_bytes: int
    """Most bytes kept for receives that were not posted yet."""
    kept_bytes: int = 0
    _posted: dict[int, deque[Receive]] = field(default_factory=dict)
    _kept: dict[int, deque[Arrival]] = field(default_factory=dict)
    _blocked: list[Callable[[], None]] = field(default_factory=list)
    _receives: set[Receive] = field(default_factory=set)

    async def receive(self, owner: object, tag: int, buffer: Buffer) -> None:
        """Fill `buffer` with the next message of `tag`. The buffer is free whenever this ends."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("a receive needs a writable buffer")
        receive = Receive(owner, tag, view, asyncio.get_running_loop().create_future())
        self._receives.add(receive)
        self._post(receive)
        try:
            error = await receive.done
        finally:
            self._withdraw(receive, PeerLost("cancelled"))
            self._receives.discard(receive)
        if error is not None:
            raise error

    def arrive(self, tag: int, size: int, source: object = None) -> Arrival | None:
        """Begin a message; None if there is no receive and no room (see `when_room`)."""
        arrival = Arrival(tag, size, source)
        receive = self._pop_posted(tag)
        if receive is not None:
            self._join(arrival, receive)
        elif self.kept_bytes + size <= self.limit_bytes:
            self.kept_bytes += size
            arrival.data = bytearray(size)
            self._kept.setdefault(tag, deque()).append(arrival)
        else:
            return None
        return arrival

    def deliver(self, tag: int, data: bytes, source: object = None) -> bool:
        """Take a whole message; False if there is neither a receive nor room for it."""
        arrival = self.arrive(tag, len(data), source)
        if arrival is None:
            return False
        if arrival.data is not None or arrival.receive is not None:
            arrival.target()[:] = data
        self.advance(arrival, len(data))
        return True

    def when_room(self, retry: Callable[[], None]) -> None:
        """Call `retry` once, the next time that a receive is posted or bytes are let go."""
        self._blocked.append(retry)

    def advance(self, arrival: Arrival, size: int) -> None:
        """`size` more bytes of the message were put where `target` said."""
        arrival.filled += size
        if arrival.complete and arrival.receive is not None:
            self._deliver(arrival, arrival.receive)

    def abandon(self, arrival: Arrival, error: TransferError) -> None:
        """The message will never be complete."""
        if arrival.complete:
            return
        if arrival.receive is not None:
            arrival.receive.end(error)
        self._discard(arrival)

    def fail(self, owner: object | None, error: TransferError) -> None:
        """End the receives posted with `owner`, or all of them."""
        for receive in list(self._receives):
            if owner is None or receive.owner is owner:
                self._withdraw(receive, error)

    def purge(self, first_tag: int, last_tag: int) -> None:
        """Let go of what is kept under these tags: nobody will ask for it."""
        self._let_go(lambda arrival: first_tag <= arrival.tag <= last_tag)

    def lose(self, source: object) -> None:
        """Let go of what `source` brought: it would lie in the way of what comes after it."""
        self._let_go(lambda arrival: arrival.source is source)

    def _let_go(self, unwanted: Callable[[Arrival], bool]) -> None:
        kept = [arrival for queue in self._kept.values() for arrival in queue]
        for arrival in kept:
            if arrival.receive is None and arrival.data is not None and unwanted(arrival):
                self._discard(arrival)

    def forget(self) -> None:
        """Nothing arrives any more: whoever waits for room may look again, and give up."""
        self._retry_blocked()

    def _post(self, receive: Receive) -> None:
        queue = self._kept.get(receive.tag, deque())
        arrival = next((each for each in queue if each.receive is None), None)
        if arrival is None:
            self._posted.setdefault(receive.tag, deque()).append(receive)
        else:
            self._join(arrival, receive)
            if arrival.complete and arrival.receive is not None:
                self._deliver(arrival, receive)
        self._retry_blocked()

    def _join(self, arrival: Arrival, receive: Receive) -> None:
        if arrival.size == receive.view.nbytes:
            arrival.receive, receive.arrival = receive, arrival
            return
        receive.end(
            CorruptFrame(f"tag {arrival.tag:#x}: {arrival.size} of {receive.view.nbytes} bytes")
        )
        self._discard(arrival)

    def _deliver(self, arrival: Arrival, receive: Receive) -> None:
        if arrival.data is not None:
            receive.view[:] = arrival.data
        self._discard(arrival)
        receive.end(None)

    def _discard(self, arrival: Arrival) -> None:
        """Let go of what was kept; bytes that are still to come go nowhere."""
        if arrival.data is None:
            return
        queue = self._kept[arrival.tag]
        queue.remove(arrival)
        if not queue:
            del self._kept[arrival.tag]
        arrival.data = None
        self.kept_bytes -= arrival.size
        self._retry_blocked()

    def _withdraw(self, receive: Receive, error: TransferError) -> None:
        queue = self._posted.get(receive.tag, deque())
        if receive in queue:
            queue.remove(receive)
            if not queue:
                del self._posted[receive.tag]
        arrival = receive.arrival
        if arrival is not None and arrival.receive is receive:
            self._discard(arrival)
        receive.end(error)

    def _pop_posted(self, tag: int) -> Receive | None:
        queue = self._posted.get(tag)
        if not queue:
            return None
        receive = queue.popleft()
        if not queue:
            del self._posted[tag]
        return receive

    def _retry_blocked(self) -> None:
        blocked, self._blocked = self._blocked, []
        for retry in blocked:
            retry()
