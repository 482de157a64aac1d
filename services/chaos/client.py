"""A client over a plain socket: streams one completion, and may leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Place: TypeAlias = tuple[str, int]
ANSWER_S = 90.0
"""Longer than every deadline of the server: whoever waits for this long hangs."""


class NotAccepted(Exception):
    """There was no connection: nothing has been asked."""


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client goes: after so many events, or so many seconds."""

    events: int
    seconds: float


@dataclass(slots=True)
class Answer:
    """One stream as its client saw it."""

    status: int = 0
    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    tokens: int = -1
    """Of the usage at its end."""
    ends: int = 0
    """Terminal events: `[DONE]`, an error event, or a body that says no."""
    error: str = ""
    left: bool = False
    retry_after: bool = False


async def ask(place: Place, body: dict[str, Any], leave: Leave | None = None) -> Answer:
    """Raises `NotAccepted`."""
    answer = Answer()
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(*place)
    except (OSError, TimeoutError) as error:
        raise NotAccepted(str(error)) from error
    try:
        async with asyncio.timeout(leave.seconds if leave else ANSWER_S):
            await _exchange(reader, writer, place, body, answer, leave)
    except TimeoutError:
        answer.left = leave is not None
        answer.error = "" if answer.left else f"no end within {ANSWER_S:g} s"
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"the connection broke: {type(error).__name__} {error}"
    finally:
        writer.close()
    return answer


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    place: Place,
    body: dict[str, Any],
    answer: Answer,
    leave: Leave | None,
) -> None:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n"
    framing = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write((head + framing).encode() + payload)
    answer.status, headers = await _head(reader)
    answer.request_id = headers.get("x-request-id", "")
    answer.retry_after = "retry-after" in headers
    if answer.status != 200:
        answer.ends = 1
        answer.error = f"{answer.status} {(await reader.read(500)).decode(errors='replace')}"
        return
    events = 0
    async for line in _lines(reader):
        data = line.removeprefix(b"data: ")
        if not data:
            continue
        events += 1
        if data == b"[DONE]":
            answer.ends += 1
        else:
            _note(json.loads(data), answer)
        if leave is not None and events >= leave.events and not answer.ends:
            answer.left = True
            return


def _note(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.ends += 1
        answer.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            answer.finishes.setdefault(index, []).append(choice["finish_reason"])
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = (await _line(reader)).split(b" ", 2)
    headers = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(status[1]), headers


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("in the middle of a line")
    return line.rstrip(b"\r\n")


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a body in chunks."""
    rest = b""
    while size := int(await _line(reader), 16):
        rest += await reader.readexactly(size)
        await _line(reader)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line


async def get(place: Place, path: str, seconds: float = 2.0) -> str:
    """The body of a small page; empty when there is no answer."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(*place)
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
    return body.decode(errors="replace")
