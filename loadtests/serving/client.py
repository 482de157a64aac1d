"""A streaming client that costs next to nothing while it measures.

Bytes are only stamped and kept while a stream runs; they are understood afterwards. A piece is
stamped when its packet was read, so an event cut in two counts from its second half.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import httptools

HOST = "127.0.0.1"


class Usage(TypedDict):
    completion_tokens: int


class Choice(TypedDict):
    text: str


class Event(TypedDict, total=False):
    """The fields of a completion chunk that are read here."""

    choices: Sequence[Choice]
    usage: Usage | None
    error: object


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of exactly these tokens; greedy, and never ended by the model.

    End tokens are banned, not merely ignored: they have no text, and a token without text would
    look like a gap.
    """

    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and what its dialect adds to their bodies."""

    port: int
    model: str
    extra: Mapping[str, object] = field(default_factory=dict)

    def message(self, request: Request) -> bytes:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(
            {
                "model": self.model,
                "prompt": list(request.prompt),
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "min_tokens": request.max_tokens,
                "ignore_eos": True,
                **usage,
                **self.extra,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class Exchange:
    """One request as it went over the wire; times are `time.monotonic()` in seconds."""

    scheduled_s: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    cut: bool = False
    """Ended by us before its end."""
    complete: bool = False
    retry_after_s: float | None = None
    """What a refusal advised."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client of the stream saw."""

    scheduled_s: float
    times_s: Sequence[float]
    """Of each event with text."""
    tokens: int
    """From the server's usage; of a stream that was cut, its events with text."""
    ended_s: float
    error: str
    """Empty for an orderly end, and for a stream that we cut."""
    cut: bool = False

    @property
    def ttft_s(self) -> float:
        """From the scheduled start to the first text."""
        return self.times_s[0] - self.scheduled_s


class Stream(asyncio.Protocol):
    """One request on its way. `closed` is set when the connection is gone."""

    def __init__(self, scheduled_s: float) -> None:
        self.exchange = Exchange(scheduled_s)
        self.started = asyncio.Event()
        """It has its first bytes, or will never have any."""
        self.closed = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.BaseTransport | None = None
        self._now_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.exchange.retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        self.exchange.pieces.append((self._now_s, body))
        self.started.set()

    def on_message_complete(self) -> None:
        self.exchange.status = self._parser.get_status_code()
        self.exchange.complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.exchange.ended_s = time.monotonic()
        self.started.set()
        self.closed.set()

    def cut(self) -> None:
        """Leave, as a client does that has read enough. Nothing happens after the end."""
        if self._transport is not None and not self.closed.is_set():
            self.exchange.cut = True
            self._transport.close()


async def open_stream(server: Server, request: Request, scheduled_s: float) -> Stream:
    """Send a request. A server that cannot be reached makes an answer with an error."""
    stream = Stream(scheduled_s)
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: stream, HOST, server.port
        )
    except OSError:
        stream.connection_lost(None)
    else:
        transport.write(server.message(request))
    return stream


async def ask(server: Server, request: Request, scheduled_s: float) -> Exchange:
    """One request to its end."""
    stream = await open_stream(server, request, scheduled_s)
    await stream.closed.wait()
    return stream.exchange


def read(exchange: Exchange) -> Answer:
    """Understand what was received. A failure is in the answer's `error`."""
    times_s: list[float] = []
    usage, error, ended, rest = 0, "", False, b""
    for at_s, piece in exchange.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not data or data == line:
                continue
            if data == b"[DONE]":
                ended = True
                continue
            event: Event = json.loads(data)
            if "error" in event:
                error = error or data.decode(errors="replace")
            times_s += [at_s for choice in event.get("choices", ()) if choice.get("text")]
            usage = (event.get("usage") or {"completion_tokens": usage})["completion_tokens"]
    if not exchange.cut and not error:
        error = _incomplete(exchange, ended, usage)
    tokens = usage or (len(times_s) if exchange.cut else 0)
    return Answer(exchange.scheduled_s, times_s, tokens, exchange.ended_s, error, exchange.cut)


def _incomplete(exchange: Exchange, ended: bool, usage: int) -> str:
    if exchange.status not in (0, 200):
        body = b"".join(piece for _, piece in exchange.pieces)
        return f"status {exchange.status}: {body[:200].decode(errors='replace')}"
    if not ended:
        return "the stream ended without [DONE]"
    return "" if usage else "the stream told no usage"
