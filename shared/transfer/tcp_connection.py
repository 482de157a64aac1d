"""One TCP connection of the `tcp` transport: frames in, frames out.

Frame, little-endian: magic 4 | version 2 | kind 2 | tag 8 | size 8 | payload. Each side's first
frame is a hello whose payload is its own address; all others are messages. Bytes that are not this
close the connection. A payload is read straight into the buffer of its receive.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, Protocol

from kvrelay.shared.errors import CorruptFrame, PeerLost, TransferError
from kvrelay.shared.transfer.mailbox import Arrival, Mailbox

_HEADER: Final = struct.Struct("<4sHHQQ")
_MAGIC: Final = b"KVRT"
_VERSION: Final = 1
_HELLO: Final = 0
_MESSAGE: Final = 1
MAX_HELLO_BYTES: Final = 512
_MAX_MESSAGE_BYTES: Final = 2**40
_SLICE_BYTES: Final = 1024 * 1024
"""Written at once: what the socket does not take of it is copied by asyncio before Python 3.12."""


class ConnectionEvents(Protocol):
    """What a connection tells its transport."""

    def connection_greeted(self, connection: Connection, remote: bytes) -> None:
        """The hello came: `remote` is the other side's address."""
        ...

    def connection_ended(self, connection: Connection, reason: str) -> None:
        """Called exactly once."""
        ...


class Connection(asyncio.BufferedProtocol):
    """Reads into the mailbox; writes one frame at a time, in the order of the calls."""

    def __init__(self, mailbox: Mailbox, own: bytes, events: ConnectionEvents) -> None:
        self._mailbox = mailbox
        self._own = own
        self._events = events
        self.remote: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The address that the other side's hello names. Raises `PeerLost` if none comes."""
        self._header = bytearray(_HEADER.size)
        self._header_filled = 0
        self._remote_hello: bytearray | None = None
        self._arrival: Arrival | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._frame = asyncio.Lock()
        self._end: TransferError | None = None

    @property
    def remote_host(self) -> str:
        """The other side's address on the network."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if name else "nowhere"

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # At 0, "drained" means that the kernel has everything and no buffer is looked at any more.
        transport.set_write_buffer_limits(high=0)
        transport.write(_HEADER.pack(_MAGIC, _VERSION, _HELLO, 0, len(self._own)) + self._own)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(f"the connection ended: {error or 'closed by the peer'}")

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._arrival is not None:
            return self._arrival.target()
        if self._remote_hello is not None:
            return memoryview(self._remote_hello)[self._header_filled :]
        return memoryview(self._header)[self._header_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._arrival is not None:
            self._mailbox.advance(self._arrival, nbytes)
            if self._arrival.complete:
                self._arrival = None
            return
        self._header_filled += nbytes
        if self._remote_hello is not None:
            self._read_hello(self._remote_hello)
        elif self._header_filled == _HEADER.size:
            self._header_filled = 0
            try:
                self._read_header()
            except CorruptFrame as error:
                self.abort(str(error))

    # --- reading

    def _read_header(self) -> None:
        magic, version, kind, tag, size = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise CorruptFrame(f"frame starts with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise CorruptFrame(f"frame has version {version}; this side speaks {_VERSION}")
        if not self.remote.done():
            if kind != _HELLO or not 0 < size <= MAX_HELLO_BYTES:
                raise CorruptFrame(f"first frame is no hello (kind {kind}, {size} bytes)")
            self._remote_hello = bytearray(size)
        elif kind != _MESSAGE or size > _MAX_MESSAGE_BYTES:
            raise CorruptFrame(f"frame of kind {kind} with {size} bytes")
        else:
            self._begin(tag, size)

    def _read_hello(self, hello: bytearray) -> None:
        if self._header_filled == len(hello):
            self._header_filled = 0
            self._remote_hello = None
            self.remote.set_result(bytes(hello))
            self._events.connection_greeted(self, bytes(hello))

    def _begin(self, tag: int, size: int) -> None:
        """Start a message; while there is neither a receive nor room for it, stop reading."""
        if self._end is not None:
            return
        arrival = self._mailbox.arrive(tag, size, self)
        if arrival is None:
            self._transport.pause_reading()
            self._mailbox.when_room(lambda: self._begin(tag, size))
            return
        self._mailbox.advance(arrival, 0)
        self._arrival = None if arrival.complete else arrival
        if not self._transport.is_reading():
            self._transport.resume_reading()

    # --- writing

    async def send(self, tag: int, payload: memoryview) -> None:
        """Returns when the kernel has all of it. Raises `PeerLost`. Must not be cancelled: a frame
        that is cut short makes the connection useless.
        """
        async with self._frame:
            header = _HEADER.pack(_MAGIC, _VERSION, _MESSAGE, tag, len(payload))
            await self._write(memoryview(header))
            for start in range(0, len(payload), _SLICE_BYTES):
                await self._write(payload[start : start + _SLICE_BYTES])

    async def _write(self, data: memoryview) -> None:
        if self._end is None:
            self._transport.write(data)
            await self._drained.wait()
        if self._end is not None:
            raise PeerLost(str(self._end))

    def abort(self, reason: str) -> None:
        """End the connection now; whoever waits for it raises `PeerLost`. Idempotent."""
        if self._end is not None:
            return
        self._end = PeerLost(reason)
        self._transport.abort()
        self._drained.set()
        if not self.remote.done():
            self.remote.set_exception(self._end)
            self.remote.exception()  # nobody may be waiting for it
        if self._arrival is not None:
            self._mailbox.abandon(self._arrival, self._end)
            self._arrival = None
        self._mailbox.lose(self)
        self._events.connection_ended(self, reason)
