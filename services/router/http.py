"""The HTTP server below the application: uvicorn, with what it lacks for answers that take long.

- A client that leaves is noticed whatever it sent before. uvicorn stops reading a connection on
  which a second request was sent ahead of time and then never learns that it was closed. Here the
  first request is answered, what was sent ahead is dropped, and the connection closes.
- A connection that does not finish a request's head within `HEAD_S` is closed, and one whose head
  is longer than `HEAD_BYTES` gets a 431.
- What is no HTTP gets its 400 in the words of the API, as JSON.
- A request that offers to go on in another protocol is served in this one, with its body.
- An idle server sleeps: uvicorn's own loop wakes ten times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from email.utils import formatdate

import httptools
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvrelay.services.router.openai.errors import INVALID, Failure

KEEP_ALIVE_S = 75
"""Longer than the idle time of the usual clients and proxies, so that they close first."""
HEAD_S = 20.0
HEAD_BYTES = 64 << 10
"""Of a request's line and headers; those of the usual clients and proxies are a tenth of it."""
NOT_HTTP = Failure(400, INVALID, "This is not a valid HTTP request")
HEAD_TOO_LARGE = Failure(431, INVALID, f"The request's head is larger than {HEAD_BYTES} bytes")


class RouterProtocol(HttpToolsProtocol):
    """One connection."""

    _ahead = False
    """A request came before the one under way was answered: from there on nothing is parsed."""
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Of the head that is being read; beyond `HEAD_BYTES` nothing of it is kept."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ahead:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (end_of_head,) = upgrade.args
            self._no_upgrade(data[end_of_head:])
        except httptools.HttpParserError:
            self._refuse(NOT_HTTP)
        else:
            if self._head_timer is not None:
                self._head_bytes += len(data)  # also of a value that the parser still collects
                if self._head_bytes > HEAD_BYTES:
                    self._refuse(HEAD_TOO_LARGE)

    def _no_upgrade(self, rest: bytes) -> None:
        """A client offers another protocol; it is not taken up, and then a body is one (RFC 9110,
        7.8). The parser believes that the request has ended: another one reads on behind a head
        that says the same of the body."""
        if not (framing := self._framing()) or self.cycle is None:
            return
        self.cycle.keep_alive = False
        self.parser = httptools.HttpRequestParser(_Body(self))
        self.data_received(b"POST / HTTP/1.1\r\n" + framing + b"\r\n" + rest)

    def _framing(self) -> bytes:
        names = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in names]
        return b"".join(lines)

    def _refuse(self, failure: Failure) -> None:
        """Answers what no application has seen, and closes."""
        if self._ahead:
            return
        self._ahead = True
        self._head_is_here()
        body = failure.body()
        lines = (
            STATUS_LINE[failure.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        )
        self.transport.write(b"".join((*lines, body)))
        self.transport.close()

    def on_message_begin(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._ahead = True
            cycle.keep_alive = False
            return
        if self._head_timer is None:
            self._await_head()
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._ahead:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._ahead:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._ahead:
            self._head_is_here()
            if len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers) > HEAD_BYTES:
                self._refuse(HEAD_TOO_LARGE)
                return
            # uvicorn renews it once a second, also when nobody asks.
            self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ahead:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ahead and not (self.parser.should_upgrade() and self._framing()):
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._no_head)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        self._head_timer = None
        self.transport.close()


class _Body:
    """Takes the one body of a connection whose head has been read."""

    def __init__(self, connection: RouterProtocol) -> None:
        self.on_body = connection.on_body
        self._connection = connection

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()
        self._connection._ahead = True


class Server(uvicorn.Server):
    """Without signal handlers of its own, for the router drains first; `stop` ends it."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=RouterProtocol,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            date_header=False,
        )
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        await self._stopping.wait()
