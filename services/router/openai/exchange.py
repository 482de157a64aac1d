"""One HTTP request on the ASGI level: its body in, its answer out, and who left when.

Written on ASGI itself, because the two things that matter are there: a client that goes away is
noticed by `receive` at once, in any phase, and a slow reader is felt in `send`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from kvrelay.shared.errors import Overloaded, RequestError

T = TypeVar("T")
_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGone(Exception):
    """The client closed its connection, or reads no more: nobody is left to be told anything."""


def header(scope: Scope, name: bytes) -> str:
    """The first header of that lower-case name, or "". HTTP headers are Latin-1."""
    pairs: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in pairs if key == name), "")


def label_of(scope: Scope) -> str:
    """The client's own id of its request, which is echoed and logged and never a key; or ""."""
    label = header(scope, b"x-request-id")
    return label if _LABEL.fullmatch(label) else ""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of request bodies, before they are parsed."""

    bytes: int = 8 << 20
    """A larger one is a 413."""
    seconds: float = 30.0
    """One that takes longer to arrive is a 408."""
    total_bytes: int = 64 << 20
    """What all bodies that are being read or parsed may take together; beyond it is a 429."""
    small_bytes: int = 64 << 10
    """The first bytes of each, which do not count: small requests are never refused for it."""


class Bodies:
    """Reads JSON bodies and keeps account of the memory they take."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    @asynccontextmanager
    async def json(self, scope: Scope, receive: Receive) -> AsyncIterator[bytearray]:
        """The body, for as long as the context lasts.

        Raises `RequestError` 400 for another content type, 413 and 408 for the limits,
        `Overloaded`, and `ClientGone`.
        """
        kind = header(scope, b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"Content-Type must be application/json, not {kind[:64]!a}")
        declared = header(scope, b"content-length")
        if declared.isdecimal() and int(declared[:20]) > self._limits.bytes:
            raise self._too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await self._fill(body, receive)
            except TimeoutError as error:
                limit = f"{self._limits.seconds:g} s"
                raise RequestError(f"The body took longer than {limit}", status=408) from error
            yield body
        finally:
            self._held_bytes -= self._counted(body)

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            before = self._counted(body)
            body += message.get("body", b"")
            self._held_bytes += self._counted(body) - before
            if len(body) > self._limits.bytes:
                raise self._too_large()
            if self._held_bytes > self._limits.total_bytes:
                raise Overloaded("Too many large bodies at the same time", retry_after_s=1.0)
            more = message.get("more_body", False)

    def _counted(self, body: bytearray) -> int:
        return max(0, len(body) - self._limits.small_bytes)

    def _too_large(self) -> RequestError:
        limit = f"{self._limits.bytes} bytes"
        return RequestError(f"The body is larger than {limit}", status=413)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and waited for as soon as the client leaves.

    Raises `ClientGone`, or what `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """The response, whose head goes out with the first byte that is known for certain."""

    def __init__(self, send: Send, headers: Sequence[tuple[str, str]], limit_s: float) -> None:
        self._send = send
        self._headers = tuple(headers)
        self._limit_s = limit_s
        self.started = False
        self.taken = False
        """The cluster has the request: how it ends is told there."""

    async def start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self.started = True
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (*headers, *self._headers)
        ]
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})

    async def whole(
        self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        kind = ("content-type", "application/json")
        await self.start(status, (kind, ("content-length", str(len(body))), *headers))
        await self.write(body, last=True)

    async def _put(self, message: dict[str, Any]) -> None:
        """Waits while the client's buffer is full, but not for ever."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._send(message)
        except (TimeoutError, OSError, RuntimeError) as error:
            raise ClientGone from error  # RuntimeError: uvloop's word for a closed transport
