"""Transport inside one process, with faults: what the protocol's tests and the simulator run on.

A `LoopbackHub` carries the messages of all its transports on one event loop. Each message's fate
(lost, late, doubled, overtaking, cut short, damaged) is decided by a `FaultPlan`; delays go through
an injected `sleep`, so a virtual clock can own them. Without a plan nothing is ever wrong.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvrelay.shared.errors import PeerLost, TransferError
from kvrelay.shared.transfer.faults import Fate, FaultPlan, Message, damaged, no_faults
from kvrelay.shared.transfer.mailbox import Mailbox
from kvrelay.shared.transfer.protocol import Address, Buffer, Peer

SCHEME: Final = "loopback"
Sleep: TypeAlias = Callable[[float], Awaitable[None]]


@dataclass(slots=True, eq=False)
class LoopbackPeer:
    """One transport as another one sees it."""

    address: Address
    alive: bool = True


@dataclass(slots=True)
class LoopbackHub:
    """The wires between the transports of one event loop."""

    plan: FaultPlan = no_faults
    sleep: Sleep = asyncio.sleep
    mailboxes: dict[Address, Mailbox] = field(default_factory=dict)
    _links: dict[tuple[Address, Address], deque[tuple[Message, Fate]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _transports: int = 0

    def new_address(self) -> Address:
        self._transports += 1
        return Address(SCHEME, b"%d" % self._transports)

    def cut(self, address: Address) -> None:
        """The process behind `address` is gone without a word: nothing reaches it any more."""
        mailbox = self.mailboxes.pop(address, None)
        if mailbox is not None:
            mailbox.forget()

    async def close(self) -> None:
        """Drop all that is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # what had ended before left no turn to say so

    def carry(self, message: Message) -> None:
        """Take a message; it arrives when its fate says so."""
        fate = self.plan(message)
        if fate.overtaken:
            self._spawn(self._deliver_late(message, fate))
            return
        link = (message.sender, message.receiver)
        if link in self._links:
            self._links[link].append((message, fate))
        else:
            self._links[link] = deque([(message, fate)])
            self._spawn(self._pump(link))

    async def _pump(self, link: tuple[Address, Address]) -> None:
        """Deliver what is on one link in order; ends when the link is empty."""
        queue = self._links[link]
        while queue:
            await self._deliver_late(*queue.popleft())
        del self._links[link]

    async def _deliver_late(self, message: Message, fate: Fate) -> None:
        if fate.delay_s > 0:
            await self.sleep(fate.delay_s)
        for _ in range(fate.copies):
            await self._deliver(message, damaged(message.data, fate))

    async def _deliver(self, message: Message, data: bytes) -> None:
        while (mailbox := self.mailboxes.get(message.receiver)) is not None:
            if mailbox.deliver(message.tag, data, message.sender):
                return
            room = asyncio.Event()
            mailbox.when_room(room.set)
            await room.wait()

    def _spawn(self, delivery: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(delivery)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class LoopbackTransport:
    """One process's end. Like shared memory, it does not notice by itself that a peer is gone."""

    def __init__(self, hub: LoopbackHub, unexpected_bytes: int = 64 * 1024 * 1024) -> None:
        self._hub = hub
        self._unexpected_bytes = unexpected_bytes
        self._mailbox = Mailbox(unexpected_bytes)
        self._peers: dict[Address, LoopbackPeer] = {}
        self._own: Address | None = None

    async def listen(self) -> Address:
        self._own = self._hub.new_address()
        self._mailbox = Mailbox(self._unexpected_bytes)
        self._hub.mailboxes[self._own] = self._mailbox
        return self._own

    async def start_over(self) -> Address:
        await self.close()
        return await self.listen()

    async def connect(self, to: Address) -> Peer:
        if to.scheme != SCHEME:
            raise TransferError(f"a {to.scheme} address cannot be reached over loopback")
        if self._own is None or to not in self._hub.mailboxes:
            raise PeerLost(f"nobody listens at {to.value!r}")
        return self._peers.setdefault(to, LoopbackPeer(to))

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        address = self._alive(peer).address
        assert self._own is not None
        self._hub.carry(Message(self._own, address, tag, bytes(buffer)))
        await asyncio.sleep(0)  # as with the other transports, others get a turn

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        await self._mailbox.receive(self._alive(peer), tag, buffer)

    async def close_peer(self, peer: Peer) -> None:
        assert isinstance(peer, LoopbackPeer)
        peer.alive = False
        self._peers.pop(peer.address, None)
        self._mailbox.fail(peer, PeerLost("the peer was closed"))
        self._mailbox.lose(peer.address)

    async def close(self) -> None:
        if self._own is not None:
            self._hub.cut(self._own)
            self._own = None
        for peer in list(self._peers.values()):
            await self.close_peer(peer)

    @property
    def kept_bytes(self) -> int:
        return self._mailbox.kept_bytes

    def purge(self, first_tag: int, last_tag: int) -> None:
        self._mailbox.purge(first_tag, last_tag)

    def carried_by(self, peer: Peer) -> str:
        return "loopback"

    def describe(self) -> str:
        return "loopback (in process)"

    def _alive(self, peer: Peer) -> LoopbackPeer:
        assert isinstance(peer, LoopbackPeer)
        if not peer.alive or self._own is None:
            raise PeerLost("the peer is gone")
        return peer
