"""Many times what the servers can do: who is refused, what they are told, and how the others fare.

First the capacity: as many clients, each with one request at a time, as are served with nobody
refused. Then a multiple of it for a while, whoever comes: a refused client comes back when it was
told to, and again. Then a newcomer every 0.1 s until one is let in, while those who were told to
come still come. `python -m loadtests.overload --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from loadtests.serving.client import Exchange, Request, ask, read
from loadtests.serving.figures import percentile
from loadtests.serving.systems import System, kvrelay_spec
from rich.console import Console
from rich.table import Table

from kvrelay.shared.checkpoint.fetch import cache_dir, default_model_path

WARM = 8
PROBE_S = 0.1
APART_S = 0.03
STEP_S = 10.0
STEP = 1.2
"""So many times as many clients, until one is refused."""


@dataclass(slots=True)
class Phase:
    """What its clients saw."""

    name: str
    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    """What refused clients were told at first."""
    waited: list[float] = field(default_factory=list)
    """Of those refused and served later: until they had a place, to what they were told first."""
    in_vain: int = 0
    """Came back, and had no place in twice the time that they were told at first."""

    @property
    def served(self) -> int:
        return len(self.took_s)

    @property
    def per_s(self) -> float:
        return self.served / self.seconds

    def note(self, exchange: Exchange) -> bool:
        """False when it was refused."""
        if exchange.status == 429:
            self.refused += 1
            return False
        answer = read(exchange)
        if answer.error:
            self.failed.append(answer.error)
        else:
            self.ttft_s.append(answer.ttft_s)
            self.took_s.append(answer.ended_s - answer.scheduled_s)
        return True


class Load:
    def __init__(self, system: System, rng: random.Random, given: argparse.Namespace) -> None:
        self.server = system.spec.server
        self._rng = rng
        self._given = given

    def request(self) -> Request:
        prompt = [self._rng.randrange(1000, 9000) for _ in range(self._given.prompt)]
        return Request(prompt, self._given.answer)

    async def ask(self, request: Request | None = None) -> Exchange:
        return await ask(self.server, request or self.request(), time.monotonic())

    async def capacity(self, clients: int, seconds: float) -> Phase:
        """Closed loop: a client comes again as soon as it was served. They begin one by one."""
        phase = Phase("capacity")
        begun_s = time.monotonic()

        async def client(number: int) -> None:
            await asyncio.sleep(number * APART_S)
            while time.monotonic() < begun_s + seconds:
                phase.note(await self.ask())

        await asyncio.gather(*map(client, range(clients)))
        phase.seconds = time.monotonic() - begun_s
        return phase

    async def most_clients(self, first: int) -> int:
        """As many as are served with nobody refused; `first` are."""
        clients = first
        while True:
            more = math.ceil(clients * STEP)
            if (await self.capacity(more, STEP_S)).refused:
                return clients
            clients = more

    async def burst(self, per_s: float, seconds: float) -> tuple[Phase, Phase]:
        """Open loop, evenly spaced; and those who came back after its end."""
        phase, later = Phase("overload", seconds), Phase("later")
        begun_s = time.monotonic()

        async def client(at_s: float) -> None:
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            request = self.request()
            first_s, told_s = time.monotonic(), 0.0
            while True:
                now = phase if at_s < begun_s + seconds else later
                if now.note(exchange := await self.ask(request)):
                    break
                if exchange.retry_after_s is None:
                    phase.failed.append("429 without Retry-After")
                    return
                passed_s = time.monotonic() - first_s
                if not told_s:
                    told_s = exchange.retry_after_s
                    phase.told_s.append(told_s)
                elif passed_s > 2 * told_s + 1:
                    phase.in_vain += 1
                    return
                if told_s > self._given.patience:
                    return
                await asyncio.sleep(exchange.retry_after_s)
                at_s = time.monotonic()
            if told_s:
                phase.waited.append((at_s - first_s) / told_s)

        count = math.ceil(per_s * seconds)
        await asyncio.gather(*(client(begun_s + at / per_s) for at in range(count)))
        later.seconds = time.monotonic() - begun_s - seconds
        return phase, later

    async def recovery(self, after_s: float) -> tuple[float, float]:
        """Of somebody who comes anew when the overload ends: seconds until it is let in, and from
        there to its first token."""
        await asyncio.sleep(after_s)
        begun_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            if (exchange := await self.ask()).status == 200:
                return asked_s - begun_s, read(exchange).ttft_s
            await asyncio.sleep(PROBE_S)  # a probe, not a load of its own


async def measure(given: argparse.Namespace, console: Console) -> int:
    options = ["--model", str(given.model), "--max-queue-requests", str(given.queue)]
    folder = cache_dir() / "overload"
    folder.mkdir(parents=True, exist_ok=True)
    system = System(kvrelay_spec([*options, *given.up.split()]), folder / "kvrelay.log")
    await system.start()
    try:
        load = Load(system, random.Random(given.seed), given)
        await asyncio.gather(*(load.ask() for _ in range(WARM)))
        clients = await load.most_clients(given.queue)
        console.print(f"capacity: {clients} clients for {given.capacity_s:g} s ...")
        at_capacity = await load.capacity(clients, given.capacity_s)
        before = memory_mib(system)
        per_s = given.times * at_capacity.per_s
        console.print(f"overload: {per_s:.1f} requests/s for {given.seconds:g} s ...")
        (under, later), (let_in_s, ttft_s) = await asyncio.gather(
            load.burst(per_s, given.seconds), load.recovery(given.seconds)
        )
        after = memory_mib(system)
    finally:
        system.stop()
    show(console, (at_capacity, under, later))
    ratio = percentile(under.ttft_s, 0.99) / percentile(at_capacity.ttft_s, 0.99)
    back = len(under.waited) + under.in_vain
    good = sum(0.5 <= ratio <= 2.0 for ratio in under.waited)
    console.print(f"p99 TTFT of the accepted, overload to capacity: {ratio:.2f}")
    console.print(f"of {back} that came back when told to, {good} had a place in half to twice it")
    console.print(
        f"a newcomer was let in {let_in_s:.2f} s after it, its first token came {ttft_s:.2f} s on"
    )
    console.print(f"memory of all parts: {before:.0f} MiB before, {after:.0f} after")
    return int(bool(at_capacity.failed or under.failed or later.failed))


def memory_mib(system: System) -> float:
    return sum(part.memory_info().rss for part in system.family()) / 2**20


def show(console: Console, phases: Sequence[Phase]) -> None:
    out = Table()
    headings = "", "served", "per s", "refused", "failed", "TTFT p50", "p99", "told p50", "most"
    for heading in headings:
        out.add_column(heading, justify="right" if heading else "left")
    for phase in phases:
        told = (percentile(phase.told_s, 0.5), max(phase.told_s)) if phase.told_s else ()
        out.add_row(
            phase.name,
            f"{phase.served}",
            f"{phase.per_s:.1f}",
            f"{phase.refused}",
            f"{len(phase.failed)}",
            f"{percentile(phase.ttft_s, 0.5):.2f} s",
            f"{percentile(phase.ttft_s, 0.99):.2f} s",
            *(f"{seconds:.0f} s" for seconds in told),
        )
    console.print(out)
    for phase in phases:
        for error in sorted({*phase.failed})[:3]:
            console.print(f"{phase.name}: {error}")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--times", type=float, default=10.0, help="capacity; default: %(default)s")
    out.add_argument("--seconds", type=float, default=60.0, help="of it; default: %(default)s")
    out.add_argument("--capacity-s", type=float, default=30.0, help="default: %(default)s")
    out.add_argument(
        "--patience",
        type=float,
        default=90.0,
        help="who is told more goes away; default: %(default)s",
    )
    out.add_argument("--queue", type=int, default=64, help="places; default: %(default)s")
    out.add_argument("--prompt", type=int, default=64, help="tokens in; default: %(default)s")
    out.add_argument("--answer", type=int, default=16, help="tokens out; default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    out.add_argument("--model", type=Path, default=default_model_path())
    out.add_argument("--up", default="", help="more options of `kvrelay up`, in one string")
    return out


def main() -> int:
    """0 when every accepted request had its whole answer."""
    gc.disable()  # a pause over its thousands of waiting clients would be taken for the server's
    return uvloop.run(measure(parser().parse_args(), Console(width=120)))


if __name__ == "__main__":
    sys.exit(main())
