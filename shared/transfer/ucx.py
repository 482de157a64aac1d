"""Transport over UCX: shared memory on one host, sockets or RDMA between hosts.

Who writes a receiver's memory, and until when, is what this file is about.

- A receive is posted to UCX only once its message is here (probe, then receive). So a receive that
  waits can be withdrawn at any moment, and one peer's receives fail without touching another's.
- Same host: endpoint error handling is off, since the shared-memory transports refuse it, and the
  `get_zcopy` scheme lets the receiver itself pull the body by CMA, in one uninterrupted step. A
  peer that is killed or frozen in the middle of anything can never write here.
- Other hosts, and hosts without shared memory among `UCX_TLS`: error handling is on. Aborting the
  endpoint ends a receive in progress and revokes its buffer.
- Shared memory without CMA or with another scheme: an aborted endpoint was seen to write on once
  its frozen peer woke. There the message lands in a buffer of our own and is copied when complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvrelay.shared.errors import CorruptFrame, PeerLost, TransferError
from kvrelay.shared.transfer.protocol import Address, Buffer, Peer
from kvrelay.shared.transfer.ucx_address import SCHEME, host_token, pack_address, unpack_address
from kvrelay.shared.transfer.ucx_endpoints import HostEndpoints
from kvrelay.shared.transfer.ucx_lanes import lanes
from kvrelay.shared.transfer.ucx_progress import UcxLibrary, UcxProgress

_SHARED_MEMORY: Final = frozenset({"posix", "sysv", "cma", "xpmem", "knem"})
_SHARED_MEMORY_WORDS: Final = _SHARED_MEMORY | {"all", "sm", "shm", "mm"}


def ucx_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """UCX settings to add to the environment before UCX starts; what the user set stays."""
    names = {word.partition(":")[0] for word in environ.get("UCX_TLS", "all").split(",")}
    defaults = {
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCXPY_PROGRESS_MODE": "blocking",
        "UCX_TCP_TX_SEG_SIZE": "256k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
        "UCX_TCP_SNDBUF": "4m",
        "UCX_TCP_RCVBUF": "4m",
    }
    # In shared memory this scheme is the safe one; over TCP it costs two thirds of the speed.
    if names & _SHARED_MEMORY_WORDS or any(name.startswith("^") for name in names):
        defaults["UCX_RNDV_SCHEME"] = "get_zcopy"
    return {name: value for name, value in defaults.items() if name not in environ}


@dataclass(slots=True, eq=False)
class UcxPeer:
    """An endpoint (None once the peer was lost) and the transfers that use it."""

    endpoint: Any
    same_host: bool
    transfers: set[_Transfer] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        # Only with error handling does UCX itself know; otherwise leases do.
        return self.endpoint is not None and bool(self.endpoint.alive)

    @property
    def written_to(self) -> bool:
        """Whether UCX may be writing into a buffer that a receive was given."""
        return any(each.started and not each.revocable for each in self.transfers)


@dataclass(slots=True, eq=False)
class _Transfer:
    """One send or receive. `done` gets its error, or None, exactly once."""

    peer: UcxPeer
    tag: int
    view: memoryview
    done: asyncio.Future[TransferError | None]
    started: bool = False
    revocable: bool = True
    """Whether it may be declared over while UCX still works on it."""

    def end(self, error: TransferError | None) -> None:
        self.peer.transfers.discard(self)
        if not self.done.done():
            self.done.set_result(error)


class UcxTransport:
    """The `Transport` over UCX. One per process at a time; `UCX_*` variables choose its ways."""

    def __init__(self) -> None:
        self._library: UcxLibrary | None = None
        self._waiting: dict[int, deque[_Transfer]] = {}
        self._peers: dict[bytes, UcxPeer] = {}
        self._endpoints = HostEndpoints()

    async def listen(self) -> Address:
        """Start UCX. Raises `TransferError` when it is missing or cannot start."""
        library = UcxLibrary()
        await library.take_over()
        self._library = library
        self._progress = UcxProgress(library, self._on_progress)
        transports = library.transports()
        self._shared_memory = bool(transports & _SHARED_MEMORY)
        self._pulls = "cma" in transports and library.setting("RNDV_SCHEME") == "get_zcopy"
        self._description = f"ucx ({', '.join(sorted(transports - {'self'}))})"
        return self._address(library)

    async def start_over(self) -> Address:
        """On the UCX that there is: with a send that is held back it cannot be freed.

        Nobody can cancel a send that its peer does not take, and UCX keeps all that it has open for
        it. What is still to come from before lies under tags that nobody receives; the next address
        is new, so no peer mistakes this transport for the last.
        """
        for peer in list(self._peers.values()):
            self._lose(peer, "the transport starts over")
        if self._library is None:
            return await self.listen()
        return self._address(self._library)

    def _address(self, library: UcxLibrary) -> Address:
        worker = bytes(library.module.get_worker_address())
        return Address(SCHEME, pack_address(worker))

    async def connect(self, to: Address) -> Peer:
        """As the protocol says; over sockets UCX connects later, and a dead peer shows then."""
        library = self._running()
        host, worker = unpack_address(to)
        known = self._peers.get(to.value)
        if known is not None and known.alive:
            return known
        if known is not None:
            self._lose(known, "UCX lost the peer")
        same_host = self._shared_memory and host == host_token()
        endpoint = self._endpoints.find(worker)
        if endpoint is None:
            try:
                endpoint = await library.module.create_endpoint_from_worker_address(
                    library.module.get_ucx_address_from_buffer(worker),
                    endpoint_error_handling=not same_host,
                )
            except library.errors as error:
                raise PeerLost(f"UCX cannot reach the peer: {error}") from error
            if same_host:
                in_use = {id(each.endpoint) for each in self._peers.values()}
                self._endpoints.keep(worker, endpoint, in_use)
        return self._peers.setdefault(to.value, UcxPeer(endpoint, same_host))

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """As the protocol says. A cancelled send keeps its buffer until it, or its peer, ends."""
        transfer = self._transfer(peer, tag, memoryview(buffer).cast("B"))
        transfer.started = True
        # No endpoint in a variable here: the traceback of a cancelled send outlives its peer, and
        # the endpoint would keep UCX's worker with it.
        self._progress.run(
            transfer.peer.endpoint.send(transfer.view, tag=tag, force_tag=True),
            lambda error: transfer.end(_named(error, transfer)),
        )
        await _outcome(transfer)
        if not transfer.peer.alive:  # ucxx calls a send that was cancelled on a dead peer sent
            raise PeerLost("the peer was lost during a send")

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """As the protocol says. Whenever it returns or raises, the buffer is the caller's again.

        Cancelled before its message arrived, it ends at once; in the middle of its message, when
        that is complete or the peer is closed.
        """
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("a receive needs a writable buffer")
        transfer = self._transfer(peer, tag, view)
        self._waiting.setdefault(tag, deque()).append(transfer)
        self._match(tag)
        self._progress.kick()
        try:
            await _outcome(transfer)
        except asyncio.CancelledError:
            if transfer.started and not transfer.revocable:
                await _uncancelled(transfer.done)
            self._drop(transfer, "cancelled")
            raise

    async def close_peer(self, peer: Peer) -> None:
        assert isinstance(peer, UcxPeer)
        self._lose(peer, "the peer was closed")

    async def close(self) -> None:
        self._stop("the transport was closed")

    @property
    def kept_bytes(self) -> int:
        return 0  # UCX has them in memory of its own, and does not count them

    def purge(self, first_tag: int, last_tag: int) -> None:
        """UCX gives a message to a receive only, and lets go of all others when it stops."""

    def carried_by(self, peer: Peer) -> str:
        assert isinstance(peer, UcxPeer)
        return ", ".join(lanes(peer.endpoint))

    def describe(self) -> str:
        return self._description

    def _running(self) -> UcxLibrary:
        if self._library is None:
            raise PeerLost("the transport is not listening")
        return self._library

    def _transfer(self, peer: Peer, tag: int, view: memoryview) -> _Transfer:
        self._running()
        assert isinstance(peer, UcxPeer)
        if not peer.alive:
            raise PeerLost("the peer is gone")
        transfer = _Transfer(peer, tag, view, asyncio.get_running_loop().create_future())
        peer.transfers.add(transfer)
        return transfer

    def _on_progress(self) -> None:
        for tag in list(self._waiting):
            self._match(tag)
        for peer in list(self._peers.values()):
            if not peer.alive:
                self._lose(peer, "UCX lost the peer")

    def _match(self, tag: int) -> None:
        """Start the receives of `tag` whose messages are here, oldest first."""
        queue = self._waiting[tag]
        while queue:
            size = self._running().probe(tag, queue[0].view.nbytes)
            if size is None:
                return
            self._receive(queue.popleft(), size)
        del self._waiting[tag]

    def _receive(self, transfer: _Transfer, size: int) -> None:
        """Take the message of `size` bytes that is here into the transfer's buffer."""
        view, staged = transfer.view, transfer.peer.same_host and not self._pulls
        # UCX refuses a message that is too long, but takes a shorter one for a full one.
        target = memoryview(bytearray(min(size, view.nbytes))) if staged else view[:size]

        def on_end(error: Exception | None) -> None:
            failure = _named(error, transfer)
            if failure is None and size != view.nbytes:
                failure = CorruptFrame(f"tag {transfer.tag:#x}: {size} of {view.nbytes} bytes")
            if failure is None and staged and not transfer.done.done():
                view[:] = target
            transfer.end(failure)

        transfer.started, transfer.revocable = True, staged
        endpoint = transfer.peer.endpoint
        self._progress.run(endpoint.recv(target, tag=transfer.tag, force_tag=True), on_end)

    def _lose(self, peer: UcxPeer, reason: str) -> None:
        """End all transfers of the peer, if need be by aborting its endpoint. Idempotent."""
        endpoint, peer.endpoint = peer.endpoint, None
        if endpoint is None:
            return
        self._peers = {key: each for key, each in self._peers.items() if each is not peer}
        if not peer.same_host or peer.written_to:
            self._abort(endpoint, reason)
        if peer.written_to:
            # Never seen: an abort that leaves a direct receive writing. Without a worker nothing
            # writes; the process has to listen again, under a new address.
            self._stop("UCX did not let go of a buffer")
        for transfer in list(peer.transfers):
            self._drop(transfer, reason)

    def _abort(self, endpoint: Any, reason: str) -> None:
        for sharer in [each for each in self._peers.values() if each.endpoint is endpoint]:
            self._lose(sharer, reason)
        self._endpoints.forget(endpoint)
        endpoint.abort()
        self._progress.settle()

    def _drop(self, transfer: _Transfer, reason: str) -> None:
        """End a transfer here, whatever UCX makes of it."""
        queue = self._waiting.get(transfer.tag, deque())
        if transfer in queue:
            queue.remove(transfer)
            if not queue:
                del self._waiting[transfer.tag]
        transfer.end(PeerLost(reason))

    def _stop(self, reason: str) -> None:
        library, self._library = self._library, None
        if library is None:
            return
        for peer in list(self._peers.values()):
            self._lose(peer, reason)
        self._endpoints.close()
        self._progress.settle()
        self._progress.close()
        library.close()


async def _outcome(transfer: _Transfer) -> None:
    # Shielded, because a cancelled caller does not end what UCX is doing.
    error = await asyncio.shield(transfer.done)
    if error is not None:
        raise error


async def _uncancelled(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])


def _named(error: Exception | None, transfer: _Transfer) -> TransferError | None:
    """The library's error in our words."""
    if error is None:
        return None
    if "truncated" in str(error).lower():
        return CorruptFrame(f"tag {transfer.tag:#x}: more than {transfer.view.nbytes} bytes")
    if "canceled" in str(error).lower() and transfer.peer.alive:
        # Of a connection before this one: it had begun to arrive when its sender let go of it.
        return CorruptFrame(f"tag {transfer.tag:#x}: its sender let go of it")
    return PeerLost(f"UCX: {error}")
