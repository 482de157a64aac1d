"""What the server does with connections, over raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from tests.unit.edge.test_router_disconnect import (
    Waiting,
    answers,
    closed,
    connected,
    request_bytes,
)

from kvrelay.services.router import http
from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import CompletionBody
from kvrelay.shared.errors import RequestError

AHEAD = b"GET /health HTTP/1.1\r\nHost: edge\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sent_ahead_is_noticed_when_it_leaves(
    port: int, cluster: Any, stream: bool
) -> None:
    script = cluster.script = Waiting()
    async with connected(port) as (_, writer):
        writer.write(request_bytes(stream) + AHEAD)
        await script.reached.wait()
    assert (await closed(cluster)).closes == 1


async def test_what_is_sent_ahead_is_dropped_and_the_connection_closes(
    port: int, cluster: Any
) -> None:
    cluster.script = cluster.saying("hello")
    async with connected(port) as (reader, writer):
        writer.write(request_bytes(stream=False) + AHEAD + b"\0garbage")
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 1 and b"hello" in answer
    assert b"connection: close" in answer
    assert await answers(port, cluster)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_that_offers_an_upgrade_is_served_with_its_body(
    port: int, cluster: Any, chunked: bool, at_once: bool
) -> None:
    cluster.script = cluster.saying("hello")
    head, _, body = request_bytes(stream=False).partition(b"\r\n\r\n")
    head += b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAA"
    if chunked:
        head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = head + b"\r\n\r\n" + body
    async with connected(port) as (reader, writer):
        for piece in [request] if at_once else [request[at : at + 1] for at in range(len(request))]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 1 and b"hello" in answer
    assert b"connection: close" in answer


async def test_an_upgrade_without_a_body_is_just_a_request(port: int) -> None:
    async with connected(port) as (reader, writer):
        offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        writer.write(AHEAD.removesuffix(b"\r\n") + offer)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b'{"status":"ok"}')


async def test_one_request_after_the_other_shares_a_connection(port: int, cluster: Any) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(AHEAD)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b'{"status":"ok"}')


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: e\r\n", AHEAD])
async def test_a_head_that_does_not_come_closes_the_connection(
    port: int, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.05)
    async with connected(port) as (reader, writer):
        if begun == AHEAD:  # the timer of the second request, not only of the connection
            writer.write(AHEAD)
            await reader.readuntil(b'{"status":"ok"}')
            begun = begun[:-2]
        writer.write(begun)
        async with asyncio.timeout(10):
            assert await reader.read() == b""


NOT_HTTP = [
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET \xff\r\n\r\n",
]
ENDLESS = [
    b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100_000,
    b"GET /health HTTP/1.1\r\n" + b"X-One: 1\r\n" * 10_000 + b"\r\n",
    b"GET /" + b"x" * 100_000,
]


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        *((sent, 400, "not a valid HTTP request") for sent in NOT_HTTP),
        *((sent, 431, "larger than 65536 bytes") for sent in ENDLESS),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_what_no_route_sees_is_refused_in_the_words_of_the_api(
    port: int, cluster: Any, sent: bytes, status: int, words: str
) -> None:
    async with connected(port) as (reader, writer):
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"content-type: application/json\r\n" in head and b"connection: close" in head
        error = json.loads(await reader.readuntil(b"}}"))["error"]
        assert words in error["message"] and error["type"] == "invalid_request_error"
    assert await answers(port, cluster)


async def test_an_endless_head_in_small_pieces_is_refused_too(port: int) -> None:
    async with connected(port) as (reader, writer):
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        writer.write(b"GET /health HTTP/1.1\r\nX-Long: ")
        for _ in range(80):
            writer.write(b"x" * 1024)
            await asyncio.sleep(0)
        assert await answer == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"


def test_a_late_duplicate_among_many_fields_costs_no_more_than_reading_them() -> None:
    fields = ",".join(f'"{number}":1' for number in range(200_000))
    with pytest.raises(RequestError, match="names the field '199999' twice"):
        parse_body(CompletionBody, f'{{{fields},"199999":1}}'.encode())
