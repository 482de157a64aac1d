"""Clients of the integration tests, from polite ones to those that vanish."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from tests.stack import Stack

FIRST_ID, LAST_ID = 3, 300
"""Ordinary tokens of the tiny tokenizer."""


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


@dataclass(frozen=True)
class Answer:
    """What a client got, whichever way: by choice, text and finish reason; and usage."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    usage: dict[str, int]


def ask(stack: Stack, path: str, body: dict[str, Any]) -> Answer:
    """One request, streamed or not as its body says. Anything but success fails the test."""
    body = {"model": stack.model, **body}
    if not body.get("stream"):
        response = stack.post(path, **body)
        assert response.status_code == 200, response.text
        return whole(response.json())
    body["stream_options"] = {"include_usage": True}
    with stack.http.stream("POST", f"{stack.url}{path}", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        return joined([*events(stream.iter_lines())])


def whole(answer: dict[str, Any]) -> Answer:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return Answer(
        tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices),
        tuple(choice["finish_reason"] for choice in choices),
        counts(answer["usage"]),
    )


def counts(usage: dict[str, Any]) -> dict[str, int]:
    return {k: usage[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream, which must end with `[DONE]` and have no error in it."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    raise AssertionError("the stream was cut off")


def delta_text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def joined(stream: Sequence[dict[str, Any]]) -> Answer:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for event in stream:
        for choice in event["choices"]:
            at = choice["index"]
            assert at not in finishes, "nothing follows the end of a choice"
            texts[at] = texts.get(at, "") + delta_text(choice)
            if choice["finish_reason"] is not None:
                finishes[at] = choice["finish_reason"]
    assert stream[-1]["choices"] == [], "usage comes last and alone"
    order = sorted(texts)
    return Answer(
        tuple(texts[at] for at in order),
        tuple(finishes[at] for at in order),
        counts(stream[-1]["usage"]),
    )


class RawClient:
    """One request on a bare socket, which can go away at any moment."""

    def __init__(self, stack: Stack, body: dict[str, Any], path: str = "/v1/completions") -> None:
        data = json.dumps({"model": stack.model, **body}).encode()
        where = urlsplit(stack.url)
        assert where.hostname and where.port
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._socket = socket.create_connection((where.hostname, where.port), timeout=30)
        self._socket.sendall(head.encode() + data)

    def read_events(self, count: int) -> None:
        """Until `count` events of a stream have come."""
        got = b""
        while got.count(b"data: ") < count:
            data = self._socket.recv(65536)
            assert data, f"the stream was cut off after {got!r}"
            got += data

    def leave(self, *, reset: bool = False) -> None:
        """Close; `reset` does it the hard way, as a killed client behind a NAT would."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()


class Neighbour:
    """Streams the same long answer again and again beside a test, and comes out undisturbed.

    Leaving the context checks every whole answer and the begun one against `expected`.
    """

    def __init__(self, stack: Stack, body: dict[str, Any], expected: str) -> None:
        self._http = stack.http
        self._url = f"{stack.url}/v1/completions"
        self._body = {"model": stack.model, "stream": True, **body}
        self._expected = expected
        self._stop = threading.Event()
        self._flowing = threading.Event()
        self._texts: list[str] = []
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._flowing.wait(30), "the neighbour's first token"
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self._problem is None, self._problem
        *whole_ones, begun = self._texts
        assert all(text == self._expected for text in whole_ones)
        assert begun and self._expected.startswith(begun)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._texts.append("")
                self._read_one()
        except (httpx.HTTPError, AssertionError) as error:
            self._problem = error

    def _read_one(self) -> None:
        with self._http.stream("POST", self._url, json=self._body) as stream:
            assert stream.status_code == 200, stream.read()
            for event in events(stream.iter_lines()):
                for choice in event["choices"]:
                    self._texts[-1] += delta_text(choice)
                self._flowing.set()
                if self._stop.is_set() and self._texts[-1]:
                    return
