"""The transport seam: five methods that move tagged byte buffers between two processes, and two
that bound what is kept for receives that never come.

Rules every implementation keeps, and `tests/contract/test_transport.py` checks:
- A message is matched by its 64-bit tag alone, at the receiving transport, in sending order per
  (sender, tag). A receive may be posted before or after its message arrives.
- A receive names its exact size; a message of another size is `CorruptFrame` for that receive.
- `send` returns when the buffer may be reused; until then it belongs to the transport.
- `recv` writes into the buffer given and into nothing else; once it has returned or raised, and for
  a cancelled receive once the peer is closed, nothing touches the buffer any more.
- `close_peer` fails that peer's waiters with `PeerLost`; `close` fails all. Both are idempotent.
- A message without a receive is kept up to a bound; beyond it its sender waits. What is kept goes
  with the peer that brought it, and by `purge`.
- Waiting costs no CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = "memoryview | bytearray | bytes"
"""Contiguous bytes; a receive needs a writable one."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a transport can be reached; `value` is opaque to everyone but its own scheme."""

    scheme: str
    """`ucx`, `tcp` or `loopback`."""
    value: bytes


@runtime_checkable
class Peer(Protocol):
    """A connection to one other transport."""

    @property
    def alive(self) -> bool: ...


class Transport(Protocol):
    """One per process. All methods are coroutines of the loop that called `listen`."""

    async def listen(self) -> Address:
        """Become reachable; the address goes into the registration record.

        Possible again after `close`, under an address that no transport had before.
        """
        ...

    async def start_over(self) -> Address:
        """Lose every peer and become reachable under a new address only.

        Its user must not use a tag again that it used before.
        """
        ...

    async def connect(self, to: Address) -> Peer:
        """Reach another one. Raises `PeerLost` (unreachable) or `TransferError` (wrong scheme)."""
        ...

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """Raises `PeerLost`."""
        ...

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """Fill `buffer` with the next message of `tag`. Raises `PeerLost` or `CorruptFrame`."""
        ...

    async def close_peer(self, peer: Peer) -> None:
        """Drop one peer, abruptly: pending sends and receives with it raise `PeerLost`."""
        ...

    async def close(self) -> None:
        """Drop everything and stop listening."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Of messages here that no receive was posted for; 0 where only the library knows."""
        ...

    def purge(self, first_tag: int, last_tag: int) -> None:
        """Let go of kept messages with these tags: no receive will be posted for them."""
        ...

    def carried_by(self, peer: Peer) -> str:
        """Names what the connection to this peer really uses, e.g. `posix, cma`."""
        ...

    def describe(self) -> str:
        """One line naming what really carries the bytes, e.g. `ucx (posix, cma, tcp)`."""
        ...
