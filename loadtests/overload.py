"""Many times what the servers can do: who is refused, what they are told, and how the others fare.

First the capacity, by as many clients as the queue has places, each with one request at a time.
Then a multiple of it for a while, whoever comes: a refused client comes back once, when it was told
to. Then a probe every 0.1 s until one is served. `python -m loadtests.overload --help`.
"""

from __future__ import annotations

import argparse
import asyncio
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
    served_again: int = 0
    """Of those refused, served when they came back."""
    refused_again: int = 0

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

    async def ask(self) -> Exchange:
        return await ask(self.server, self.request(), time.monotonic())

    async def capacity(self, clients: int, seconds: float) -> Phase:
        """Closed loop: a client comes again as soon as it was served."""
        phase = Phase("capacity")
        begun_s = time.monotonic()

        async def client() -> None:
            while time.monotonic() < begun_s + seconds:
                phase.note(await self.ask())

        await asyncio.gather(*(client() for _ in range(clients)))
        phase.seconds = time.monotonic() - begun_s
        return phase

    async def burst(self, per_s: float, seconds: float) -> Phase:
        """Open loop, evenly spaced."""
        phase = Phase("overload")
        begun_s = time.monotonic()

        async def client(at_s: float) -> None:
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            first = await self.ask()
            if phase.note(first):
                return
            told_s = first.retry_after_s
            if told_s is None:
                phase.failed.append("429 without Retry-After")
                return
            phase.told_s.append(told_s)
            await asyncio.sleep(told_s)
            if phase.note(await self.ask()):
                phase.served_again += 1
            else:
                phase.refused_again += 1

        count = math.ceil(per_s * seconds)
        await asyncio.gather(*(client(begun_s + at / per_s) for at in range(count)))
        phase.seconds = time.monotonic() - begun_s
        return phase

    async def recovery(self) -> float:
        """Seconds until somebody who comes anew is served."""
        begun_s = time.monotonic()
        while True:
            if (await self.ask()).status == 200:
                return time.monotonic() - begun_s
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
        console.print(f"capacity: {given.queue} clients for {given.seconds:g} s ...")
        at_capacity = await load.capacity(given.queue, given.seconds)
        before = memory_mib(system)
        per_s = given.times * at_capacity.per_s
        console.print(f"overload: {per_s:.1f} requests/s for {given.seconds:g} s ...")
        under = await load.burst(per_s, given.seconds)
        recovered_s = await load.recovery()
        after = memory_mib(system)
    finally:
        system.stop()
    show(console, (at_capacity, under))
    ratio = percentile(under.ttft_s, 0.99) / percentile(at_capacity.ttft_s, 0.99)
    back = under.served_again + under.refused_again
    console.print(f"p99 TTFT of the accepted, overload to capacity: {ratio:.2f}")
    console.print(f"of {back} that came back when told to, {under.served_again} were served")
    console.print(f"a newcomer after it was served within {recovered_s:.2f} s")
    console.print(f"memory of all parts: {before:.0f} MiB before, {after:.0f} after")
    return int(bool(at_capacity.failed or under.failed))


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
    out.add_argument("--seconds", type=float, default=60.0, help="of each; default: %(default)s")
    out.add_argument("--queue", type=int, default=64, help="places; default: %(default)s")
    out.add_argument("--prompt", type=int, default=64, help="tokens in; default: %(default)s")
    out.add_argument("--answer", type=int, default=16, help="tokens out; default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    out.add_argument("--model", type=Path, default=default_model_path())
    out.add_argument("--up", default="", help="more options of `kvrelay up`, in one string")
    return out


def main() -> int:
    """0 when every accepted request had its whole answer."""
    return uvloop.run(measure(parser().parse_args(), Console(width=120)))


if __name__ == "__main__":
    sys.exit(main())
