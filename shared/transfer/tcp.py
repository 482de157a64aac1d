"""Transport over plain TCP streams, for machines without UCX.

Either side of a connection may send. `connect` to a transport that has already connected here uses
that connection, and a message is matched by its tag whichever connection brought it, so both ends
may connect to each other in any order.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.errors import ConfigError, PeerLost, TransferError
from kvrelay.shared.ports import is_wildcard
from kvrelay.shared.transfer.mailbox import Mailbox
from kvrelay.shared.transfer.protocol import Address, Buffer, Peer
from kvrelay.shared.transfer.tcp_connection import Connection

SCHEME: Final = "tcp"
CONNECT_TIMEOUT_S: Final = 5.0
UNEXPECTED_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class TcpPeer:
    """Another transport and the connections to it; the first one carries what is sent."""

    connections: list[Connection] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return bool(self.connections)


class TcpTransport:
    """The `Transport` over TCP. `host` is bound; `advertise` is what others are told to reach."""

    def __init__(
        self,
        host: str,
        advertise: str | None = None,
        port: int = 0,
        unexpected_bytes: int = UNEXPECTED_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._host = host
        self._advertise = _reachable(advertise or host)
        self._port = port
        self._connect_timeout_s = connect_timeout_s
        self._unexpected_bytes = unexpected_bytes
        self._mailbox = Mailbox(unexpected_bytes)
        self._peers: dict[bytes, TcpPeer] = {}
        self._connections: dict[Connection, TcpPeer | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> Address:
        """Bind. Raises `ConfigError` when the host or port cannot be bound."""
        loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._unexpected_bytes)
        try:
            self._server = await loop.create_server(self._connection, self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        port = self._server.sockets[0].getsockname()[1]
        # The random part tells this transport from the next one on the same port.
        self._own = f"{self._advertise} {port} {secrets.token_hex(8)}".encode()
        return Address(SCHEME, self._own)

    async def start_over(self) -> Address:
        await self.close()
        return await self.listen()

    async def connect(self, to: Address) -> Peer:
        host, port = _host_and_port(to)
        self._running()
        known = self._peers.get(to.value)
        if known is not None and known.alive:
            return known
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    self._connection, host, port
                )
                remote = await asyncio.shield(connection.remote)
        except (OSError, TimeoutError, PeerLost) as error:
            raise PeerLost(f"cannot reach {host}:{port}: {str(error) or 'timed out'}") from error
        if remote != to.value:
            connection.abort("not the transport that was meant")
            raise PeerLost(f"another process now answers at {host}:{port}")
        return self._peers[remote]

    async def send(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """As the protocol says. A cancelled send keeps its buffer until it, or its peer, ends."""
        assert isinstance(peer, TcpPeer)
        if not peer.alive:
            raise PeerLost("the peer is gone")
        payload = memoryview(buffer).cast("B")
        task = asyncio.ensure_future(peer.connections[0].send(tag, payload))
        self._tasks.add(task)
        task.add_done_callback(self._sent)
        await asyncio.shield(task)

    async def recv(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        """As the protocol says. Whenever it returns or raises, the buffer is the caller's again."""
        assert isinstance(peer, TcpPeer)
        if not peer.alive:
            raise PeerLost("the peer is gone")
        await self._mailbox.receive(peer, tag, buffer)

    async def close_peer(self, peer: Peer) -> None:
        assert isinstance(peer, TcpPeer)
        self._lose(peer, "the peer was closed")

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in list(self._connections):
            connection.abort("the transport was closed")
        self._mailbox.fail(None, PeerLost("the transport was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if server is not None:
            await server.wait_closed()

    @property
    def kept_bytes(self) -> int:
        return self._mailbox.kept_bytes

    def purge(self, first_tag: int, last_tag: int) -> None:
        self._mailbox.purge(first_tag, last_tag)

    def carried_by(self, peer: Peer) -> str:
        assert isinstance(peer, TcpPeer)
        names = {each.remote_host for each in peer.connections[:1]}
        return ", ".join(f"tcp to {name}" for name in names)

    def describe(self) -> str:
        return "tcp (asyncio streams)"

    # --- events of the connections

    def connection_greeted(self, connection: Connection, remote: bytes) -> None:
        peer = self._peers.setdefault(remote, TcpPeer())
        peer.connections.append(connection)
        self._connections[connection] = peer

    def connection_ended(self, connection: Connection, reason: str) -> None:
        peer = self._connections.pop(connection)
        if peer is not None:
            self._lose(peer, reason)

    def _connection(self) -> Connection:
        connection = Connection(self._mailbox, self._own, self)
        self._connections[connection] = None
        # A stranger that connects and stays silent is not kept.
        asyncio.get_running_loop().call_later(
            self._connect_timeout_s, self._drop_silent, connection
        )
        return connection

    def _drop_silent(self, connection: Connection) -> None:
        if not connection.remote.done():
            connection.abort("no hello in time")

    def _lose(self, peer: TcpPeer, reason: str) -> None:
        connections, peer.connections = peer.connections, []
        self._peers = {key: each for key, each in self._peers.items() if each is not peer}
        for connection in connections:
            connection.abort(reason)
        self._mailbox.fail(peer, PeerLost(reason))

    def _running(self) -> None:
        if self._server is None:
            raise PeerLost("the transport is not listening")

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have been cancelled


def _reachable(host: str) -> str:
    """The host, if others can use it. A wildcard is for binding only."""
    if not host or any(letter.isspace() for letter in host):
        raise ConfigError(f"advertise: {host!r} is not a host name or address")
    if is_wildcard(host):
        raise ConfigError(f"advertise: {host} is no address that others can reach; name one")
    return host


def _host_and_port(address: Address) -> tuple[str, int]:
    if address.scheme != SCHEME:
        raise TransferError(f"a {address.scheme} address cannot be reached over tcp")
    host, _, rest = address.value.decode(errors="replace").partition(" ")
    port, _, _ = rest.partition(" ")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise TransferError(f"not a tcp address: {address.value!r}")
    return host, int(port)
