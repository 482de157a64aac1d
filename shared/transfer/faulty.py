"""A transport that does to its own messages what a chaos plan says, whatever carries them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.errors import PeerLost
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.transfer.faults import Fate, chunk_step, damaged, fate_of
from kvrelay.shared.transfer.protocol import Address, Buffer, Peer, Transport

log = logging.getLogger(__name__)


class FaultyTransport:
    """What is sent through it may be lost, late, doubled, overtaken, cut short or damaged."""

    def __init__(
        self,
        inner: Transport,
        chaos: Chaos,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._inner = inner
        self._chaos = chaos
        self._sleep = sleep
        self._tasks = TaskSet()

    async def listen(self) -> Address:
        return await self._inner.listen()

    async def start_over(self) -> Address:
        await self._tasks.cancel()
        return await self._inner.start_over()

    async def connect(self, to: Address) -> Peer:
        return await self._inner.connect(to)

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """As the protocol says of what it lets through."""
        hit = self._chaos.at(chunk_step(tag))
        if hit is None:
            await self._inner.send(peer, tag, buffer)
            return
        view = memoryview(buffer).cast("B")
        fate = fate_of(hit, view.nbytes)
        data = damaged(view, fate)
        if fate.overtaken:
            self._tasks.spawn(self._overtaken(peer, tag, data, fate))
            return
        if fate.delay_s > 0:
            await self._sleep(fate.delay_s)
        for _ in range(fate.copies):
            await self._inner.send(peer, tag, data)

    async def _overtaken(self, peer: Peer, tag: int, data: bytes, fate: Fate) -> None:
        await self._sleep(fate.delay_s)
        try:
            await self._inner.send(peer, tag, data)
        except PeerLost as error:
            log.info("chaos: a message that was held back is lost: %s", error)

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        await self._inner.recv(peer, tag, buffer)

    async def close_peer(self, peer: Peer) -> None:
        await self._inner.close_peer(peer)

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._inner.close()

    @property
    def kept_bytes(self) -> int:
        return self._inner.kept_bytes

    def purge(self, first_tag: int, last_tag: int) -> None:
        self._inner.purge(first_tag, last_tag)

    def carried_by(self, peer: Peer) -> str:
        return self._inner.carried_by(peer)

    def describe(self) -> str:
        return f"{self._inner.describe()}, with chaos"
