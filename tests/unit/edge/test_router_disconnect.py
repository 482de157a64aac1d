"""A client that leaves, on real sockets: in every phase the generation is closed, once and soon."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.http import Server
from kvrelay.services.router.openai.api import create_app
from kvrelay.services.router.openai.exchange import BodyLimits
from kvrelay.services.router.openai.generate import EdgeSettings
from kvrelay.services.router.openai.observer import Outcome, Unobserved
from kvrelay.services.router.openai.wording import Usage
from kvrelay.shared.types import ValidRequest

NEVER_S = 20.0
"""Only a bound for a failing test."""


def request_bytes(stream: bool, prompt: str = "hi") -> bytes:
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.stop()
        await task


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(NEVER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def closed(cluster: Any, number: int = 0) -> Any:
    async with asyncio.timeout(NEVER_S):
        await cluster.generations[number].closed.wait()
    return cluster.generations[number]


class Waiting:
    """A script that plays its events, tells that it did, and then waits for ever."""

    def __init__(self, *events: TokenEvent) -> None:
        self.events = events
        self.reached = asyncio.Event()

    def __call__(self, request: ValidRequest) -> Any:
        return self._steps()

    def _steps(self) -> Any:
        yield from self.events
        self.reached.set()
        yield asyncio.Event()


class Endless:
    """A script that tells when it was begun and never ends."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.begun = asyncio.Event()

    def __call__(self, request: ValidRequest) -> Iterator[TokenEvent]:
        self.begun.set()
        return (TokenEvent(0, index, self.token) for index in range(10**9))


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(port: int, cluster: Any, stream: bool) -> None:
    script = cluster.script = Waiting()
    async with connected(port) as (_, writer):
        writer.write(request_bytes(stream))
        await script.reached.wait()
    assert (await closed(cluster)).closes == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_between_tokens(port: int, cluster: Any, stream: bool) -> None:
    script = cluster.script = Waiting(TokenEvent(0, 0, cluster.byte_ids[b"x"]))
    async with connected(port) as (reader, writer):
        writer.write(request_bytes(stream))
        await script.reached.wait()
        if stream:
            await reader.readuntil(b'"text": "x"')
    assert (await closed(cluster)).closes == 1


async def test_leaving_while_reading_nothing(port: int, cluster: Any) -> None:
    """The server is stuck in a full socket buffer, not waiting for a token."""
    token = cluster.byte_ids[b"x"]
    endless = cluster.script = Endless(token)
    async with connected(port) as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes(stream=True))
        await endless.begun.wait()
        assert await answers(port, cluster), "a slow reader must not hold up the others"
    assert (await closed(cluster)).closes == 1


async def answers(port: int, cluster: Any) -> bool:
    cluster.script = cluster.saying("hello")
    async with connected(port) as (reader, writer):
        writer.write(request_bytes(stream=False))
        return b"200 OK" in await reader.readuntil(b"\r\n")


async def test_leaving_in_the_middle_of_the_body(port: int, cluster: Any) -> None:
    async with connected(port) as (_, writer):
        writer.write(request_bytes(stream=True)[:-5])
        await writer.drain()
    assert await answers(port, cluster)
    assert len(cluster.requests) == 1


async def test_a_whole_answer_closes_once(port: int, cluster: Any) -> None:
    assert await answers(port, cluster)
    assert (await closed(cluster)).closes == 1


async def test_the_connection_serves_another_request_after_a_stream(
    port: int, cluster: Any
) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(request_bytes(stream=True))
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [generation.closes for generation in cluster.generations] == [1, 1]


async def test_a_stop_string_closes_while_events_would_go_on(port: int, cluster: Any) -> None:
    token = cluster.byte_ids[b"x"]
    cluster.script = Waiting(*(TokenEvent(0, i, token) for i in range(4)))
    body = json.dumps({"model": "tiny", "prompt": "hi", "stop": "xxx"}).encode()
    head = request_bytes(stream=False).partition(b"Content-Length")[0]
    async with connected(port) as (reader, writer):
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
    generation = await closed(cluster)
    assert (generation.stopped, generation.closes) == ([0], 1)


class Outcomes(Unobserved):
    def __init__(self) -> None:
        self.seen: list[tuple[Outcome, int]] = []
        self.some = asyncio.Event()

    def ended(self, request: ValidRequest, outcome: Outcome, usage: Usage) -> None:
        self.seen.append((outcome, usage.completion_tokens))
        self.some.set()


async def test_a_reader_that_takes_nothing_for_too_long_is_gone(cluster: Any, card: Any) -> None:
    observer = Outcomes()
    settings = EdgeSettings(send_s=0.05)
    cluster.script = Endless(cluster.byte_ids[b"x"])
    app = create_app(cluster, lambda: card, settings, observer)
    async with serving(app) as port, connected(port) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes(stream=True))
        async with asyncio.timeout(NEVER_S):
            await observer.some.wait()
    ((outcome, tokens),) = observer.seen
    assert outcome is Outcome.CLIENT_GONE
    assert tokens > 0
    assert cluster.generations[0].closes == 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_every_accepted_request_has_one_outcome(
    cluster: Any, card: Any, leaves: bool
) -> None:
    observer = Outcomes()
    app = create_app(cluster, lambda: card, observer=observer)
    async with serving(app) as port:
        if leaves:
            script = cluster.script = Waiting(TokenEvent(0, 0, cluster.byte_ids[b"x"]))
            async with connected(port) as (_, writer):
                writer.write(request_bytes(stream=False))
                await script.reached.wait()
        else:
            assert await answers(port, cluster)
        async with asyncio.timeout(NEVER_S):
            await observer.some.wait()
    assert observer.seen == [(Outcome.CLIENT_GONE, 1) if leaves else (Outcome.FINISHED, 6)]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_sends_all_of_a_large_body_first_still_reads_its_413(
    port: int, cluster: Any, chunked: bool
) -> None:
    head = request_bytes(stream=False).partition(b"Content-Length")[0]
    body = b" " * (24 << 20)
    async with connected(port) as (reader, writer):
        if chunked:
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body))
            writer.write(body + b"\r\n0\r\n\r\n")
        else:
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        assert b"larger than 8388608 bytes" in await reader.readuntil(b"}}")
    assert await answers(port, cluster)


async def test_a_body_that_comes_too_slowly_is_a_408(cluster: Any, card: Any) -> None:
    app = create_app(cluster, lambda: card, EdgeSettings(BodyLimits(seconds=0.05)))
    async with serving(app) as port, connected(port) as (reader, writer):
        writer.write(request_bytes(stream=True)[:-5])
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 408 Request Timeout\r\n"
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
        assert b"longer than 0.05 s" in await reader.read()


async def test_bodies_together_are_bounded_but_small_ones_always_pass(
    cluster: Any, card: Any
) -> None:
    limits = BodyLimits(total_bytes=1000, small_bytes=300)
    app = create_app(cluster, lambda: card, EdgeSettings(limits))
    large = request_bytes(stream=False, prompt="x" * 1000)
    async with serving(app) as port, connected(port) as (_, waiting):
        waiting.write(large[:-10])
        async with connected(port) as (reader, writer):
            writer.write(large)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 429 Too Many Requests\r\n"
            assert b"retry-after: 1\r\n" in await reader.readuntil(b"\r\n\r\n")
        assert await answers(port, cluster)
        waiting.transport.abort()
        async with connected(port) as (reader, writer):
            writer.write(large)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 400 Bad Request\r\n"
