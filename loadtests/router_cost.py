"""What a router costs: time added to each token, tokens per second on one core, memory per stream.

A worker that computes nothing speaks the real protocol to a real router: it gives out tokens as
they are asked of it, by a clock or as fast as their readers take them. Worker and readers are one
process, so that one clock stamps a token's leaving and its arrival, on other cores than the router,
which has one to itself. What is added to a token is all of its way: gRPC, router, HTTP, reading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop
from loadtests.serving.figures import percentile
from loadtests.serving.mock_worker import CONTEXT_TOKENS, Leg, Worker, registered
from rich.console import Console
from rich.table import Table
from tests.stack import Stack, until

from kvrelay.shared.checkpoint.fetch import default_model_path
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer

WINDOW_TOKENS = 8
"""Of each stream, on their way at the same time, when as fast as possible."""
STEP_S = 0.02
"""Between two tokens of one stream, when by the clock."""
LATENCY_BAR_MS, RATE_BAR = 1.0, 5000.0


class Reader(asyncio.Protocol):
    """One client's connection: it asks once, and stamps each event."""

    def __init__(self, request: bytes, worker: Worker, read: asyncio.Event) -> None:
        self._request = request
        self._worker = worker
        self._read = read
        self._rest = b""
        self.leg: Leg | None = None
        self.failure = ""
        self.begun = asyncio.Event()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if self.leg is None:
            self._rest += data
            if not self._rest.startswith(b"HTTP/1.1 200"):
                self.failure = self._rest[:300].decode("latin-1")
                self.begun.set()
                return
            _, found, named = self._rest.partition(b'"id": "cmpl-')
            if not found:
                return
            self.leg = self._worker.running[named.partition(b'"')[0].decode() + "/0"]
            self.begun.set()
            data = self._rest
        self.leg.came_ns += [now_ns] * data.count(b'"finish_reason": null')
        self._read.set()


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one number of streams."""

    streams: int
    tokens_per_s: float
    """As fast as possible, by the wall clock; the readers and the worker may be what is slow."""
    tokens_per_cpu_s: float
    """The same by the router's own CPU time: what a whole core would carry."""
    added_p50_ms: float
    added_p99_ms: float
    """By the clock, streams not in step with each other."""
    step_p99_ms: float
    """By the clock, all streams' tokens in one step: the last of them waits for the others."""
    bytes_per_stream: int | None
    """Of the router's own memory; None for too few to tell."""


class Bench:
    """One router, one worker, any number of readers."""

    def __init__(self, stack: Stack, worker: Worker) -> None:
        host, port = stack.router.detail["address"].rsplit(":", 1)
        self._place = host, int(port)
        self._worker = worker
        self._process = psutil.Process(stack.router.pid)
        body = json.dumps(
            {
                "model": stack.model,
                "prompt": "hello",
                "max_tokens": CONTEXT_TOKENS - 64,
                "stream": True,
            }
        ).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    @asynccontextmanager
    async def streams(self, number: int, read: asyncio.Event) -> AsyncIterator[list[Leg]]:
        """Open, with one token each."""
        loop, readers = asyncio.get_running_loop(), []
        try:
            for _ in range(number):
                self._worker.changed.clear()
                known = len(self._worker.running)
                _, reader = await loop.create_connection(
                    lambda: Reader(self._request, self._worker, read), *self._place
                )
                readers.append(reader)
                while len(self._worker.running) == known and not reader.failure:
                    self._worker.changed.clear()
                    await self._worker.changed.wait()
                self._worker.give([*self._worker.running.values()][-1])
            for reader in readers:
                await asyncio.wait_for(reader.begun.wait(), 30)
                if reader.failure:
                    raise RuntimeError(reader.failure)
            yield [reader.leg for reader in readers if reader.leg is not None]
        finally:
            for reader in readers:
                reader.transport.abort()
            while self._worker.running:
                self._worker.changed.clear()
                await self._worker.changed.wait()

    async def measured(self, number: int, seconds: float) -> Figures:
        read = asyncio.Event()
        empty = self._process.memory_full_info().uss
        async with self.streams(number, read) as legs:
            memory = (self._process.memory_full_info().uss - empty) // number
            rate, per_cpu = await self._fast(legs, read, seconds)
            apart = await self._by_clock(legs, read, seconds, in_step=False)
            together = await self._by_clock(legs, read, seconds, in_step=True)
        return Figures(
            streams=number,
            tokens_per_s=rate,
            tokens_per_cpu_s=per_cpu,
            added_p50_ms=percentile(apart, 0.5),
            added_p99_ms=percentile(apart, 0.99),
            step_p99_ms=percentile(together, 0.99),
            bytes_per_stream=memory if number >= 100 else None,
        )

    async def _fast(
        self, legs: list[Leg], read: asyncio.Event, seconds: float
    ) -> tuple[float, float]:
        before = sum(len(leg.came_ns) for leg in legs)
        cpu, begun = self._cpu_s(), time.monotonic()
        while time.monotonic() < begun + seconds:
            read.clear()
            for leg in legs:
                for _ in range(WINDOW_TOKENS - len(leg.left_ns) + len(leg.came_ns)):
                    self._worker.give(leg)
            await read.wait()
        tokens = sum(len(leg.came_ns) for leg in legs) - before
        took, used = time.monotonic() - begun, self._cpu_s() - cpu
        await self._all_read(legs, read)
        return tokens / took, tokens / used

    async def _by_clock(
        self, legs: list[Leg], read: asyncio.Event, seconds: float, *, in_step: bool
    ) -> list[float]:
        """Milliseconds from leaving to arrival, of each token."""
        step_s = max(STEP_S, len(legs) * STEP_S / 32)  # more than 32 streams are not given more
        marks = {id(leg): len(leg.left_ns) for leg in legs}
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        done: asyncio.Future[None] = loop.create_future()

        def give(number: int) -> None:
            at = begun + step_s * number / (1 if in_step else len(legs))
            if at > begun + seconds:
                done.set_result(None)
                return
            for leg in legs if in_step else (legs[number % len(legs)],):
                self._worker.give(leg)
            loop.call_later(max(0.0, at - time.monotonic()), give, number + 1)

        give(0)
        await done
        await self._all_read(legs, read)
        return [
            (came - left) / 1e6
            for leg in legs
            for left, came in zip(
                leg.left_ns[marks[id(leg)] :], leg.came_ns[marks[id(leg)] :], strict=True
            )
        ]

    async def _all_read(self, legs: list[Leg], read: asyncio.Event) -> None:
        async with asyncio.timeout(30):
            while any(len(leg.left_ns) > len(leg.came_ns) for leg in legs):
                await read.wait()
                read.clear()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


async def run(numbers: list[int], seconds: float, folder: Path) -> list[Figures]:
    model = default_model_path()
    tokenizer = load_tokenizer(model)
    worker = Worker(tokenizer.encode(" the", add_special=False)[0])
    stack = Stack(
        folder / "stack", model, max_queue_requests=max(numbers) + 1, idle_s=600.0, route="auto"
    )
    try:
        await asyncio.to_thread(stack.start_valkey)
        async with registered(stack.redis_url, worker, tokenizer.identity):
            await asyncio.to_thread(stack.router.start)
            apart(stack.router.pid)
            stack.url = f"http://{stack.router.detail['address']}"
            await asyncio.to_thread(until, stack.ready, 30.0, "the router is ready")
            bench = Bench(stack, worker)
            await bench.measured(1, 1.0)  # warm
            return [await bench.measured(number, seconds) for number in numbers]
    finally:
        await asyncio.to_thread(stack.stop)


def apart(router: int) -> None:
    """The router has one core, this process the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        for thread in psutil.Process(router).threads():
            os.sched_setaffinity(thread.id, {first})
        os.sched_setaffinity(0, set(others))


def show(figures: list[Figures], console: Console) -> None:
    table = Table(title="one router on one core")
    for title in (
        *("streams", "tokens/s", "per CPU s", "added p50 ms", "p99 ms", "in step p99 ms"),
        "KiB per stream",
    ):
        table.add_column(title, justify="right")
    for one in figures:
        memory = "-" if one.bytes_per_stream is None else f"{one.bytes_per_stream / 1024:.1f}"
        table.add_row(
            *(f"{one.streams:,}", f"{one.tokens_per_s:,.0f}", f"{one.tokens_per_cpu_s:,.0f}"),
            *(f"{one.added_p50_ms:.2f}", f"{one.added_p99_ms:.2f}", f"{one.step_p99_ms:.2f}"),
            memory,
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,32,100,1000", help="numbers of open streams")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of three parts")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    numbers = [int(number) for number in options.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="kvrelay-cost-") as folder:
        figures = uvloop.run(run(numbers, options.seconds, Path(folder)))
    show(figures, Console())
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=1))
    by_streams = {one.streams: one for one in figures}
    bars = [
        one.added_p99_ms <= LATENCY_BAR_MS for number, one in by_streams.items() if number == 32
    ] + [one.tokens_per_cpu_s >= RATE_BAR for one in figures]
    return 0 if all(bars) else 1


if __name__ == "__main__":
    sys.exit(main())
