"""Conversations among several workers: does each turn land where its prefix is?

`kvrelay up` with two workers of each role. Conversations of several turns run side by side; then
the router is killed and each asks once more; then a decode worker is killed and each asks once more
again. Shown are, for each part, the blocks that were found of those that the turns before had left,
and how evenly the workers were loaded: their CPU time, by role.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import httpx
import psutil
import uvloop
from loadtests.serve_bench import words_of
from loadtests.serving.client import HOST
from loadtests.serving.scenarios import Prompts
from loadtests.serving.systems import MODEL, System, SystemFailed, kvrelay_spec
from rich.console import Console
from rich.table import Table

from kvrelay.shared.checkpoint.fetch import cache_dir, default_model_path
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer

BLOCK = 16
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 100, 24, 24
THINK_S = 1.0
"""Longest time between an answer and the next question."""
REUSE_BAR, EVEN_BAR = 0.95, 1.3
READY_S = 60.0
RETRIES = "kvrelay_attempts_total"


@dataclass(slots=True)
class Conversation:
    """Its tokens so far: all that a worker may hold of the next prompt."""

    known: list[int] = field(default_factory=list)
    turns: int = 0


@dataclass(slots=True)
class Found:
    """Of all turns of one part that had turns before them."""

    left_blocks: int = 0
    found_blocks: int = 0

    @property
    def share(self) -> float:
        return self.found_blocks / self.left_blocks


@dataclass(slots=True)
class Client:
    """One `kvrelay up`, and how to talk to it."""

    system: System
    http: httpx.AsyncClient
    prompts: Prompts
    tokenizer: TokenizerInfo

    async def turn(self, talk: Conversation, found: Found) -> None:
        fresh = self.prompts.take(QUESTION_TOKENS if talk.turns else FIRST_TOKENS)
        prompt = [*talk.known, *fresh]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise SystemFailed(f"a turn failed: {response.status_code} {response.text[:200]}")
        answer = response.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        left = len(talk.known) // BLOCK
        found.left_blocks += left
        found.found_blocks += min(cached // BLOCK, left)
        text = self.tokenizer.encode(answer["choices"][0]["text"], False)
        talk.known, talk.turns = [*prompt, *text], talk.turns + 1

    async def converse(self, talks: Sequence[Conversation], turns: int, seed: str) -> Found:
        """All side by side."""
        found = Found()

        async def one(number: int, talk: Conversation) -> None:
            rng = random.Random(f"{seed} {number}")
            for _ in range(turns):
                await asyncio.sleep(rng.uniform(0, THINK_S))
                await self.turn(talk, found)

        await asyncio.gather(*(one(number, talk) for number, talk in enumerate(talks)))
        return found

    def parts(self, role: str) -> list[psutil.Process]:
        """The processes of a role, in the order of their start."""
        named = [part for part in self.system.family() if f"cli {role}" in " ".join(part.cmdline())]
        return sorted(named, key=psutil.Process.create_time)

    async def retries(self) -> float:
        """Attempts that replaced a lost one."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(RETRIES) and 'cause="first"' not in line
        )

    async def wait_ready(self, workers: int) -> None:
        """Until the router serves and sees so many workers."""
        try:
            async with asyncio.timeout(READY_S):
                while not await self._sees(workers):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise SystemFailed(f"no router that sees {workers} workers in {READY_S:g} s") from None

    async def _sees(self, workers: int) -> bool:
        try:
            page = (await self.http.get("/metrics")).text
        except httpx.HTTPError:
            return False
        seen = [line for line in page.splitlines() if 'state="ready"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in seen) == workers


def cpu_s(parts: Sequence[psutil.Process]) -> list[float]:
    return [sum(part.cpu_times()[:2]) for part in parts]


async def measure(given: argparse.Namespace, table: Table) -> bool:
    """Fills `table`; whether all bars were reached."""
    flags = ("--prefill", "2", "--decode", "2", "--threads", "1", "--model", str(given.model))
    logs = cache_dir() / "conversations_bench"
    logs.mkdir(parents=True, exist_ok=True)
    system = System(kvrelay_spec(flags), logs / "up.log")
    base = f"http://{HOST}:{system.spec.server.port}"
    talks = [Conversation() for _ in range(given.conversations)]
    good = True

    def row(part: str, found: Found, rest: str, bar: float = REUSE_BAR) -> None:
        nonlocal good
        good &= found.share >= bar
        counts = f"{found.found_blocks:,} of {found.left_blocks:,}"
        table.add_row(part, counts, f"{found.share:.1%}", rest)

    try:
        await system.start()
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as http:
            prompts = Prompts(words_of(given.model), f"{given.seed}")
            client = Client(system, http, prompts, load_tokenizer(given.model))
            await client.wait_ready(4)
            workers = {role: client.parts(role) for role in ("prefill", "decode")}
            before = {role: cpu_s(parts) for role, parts in workers.items()}
            found = await client.converse(talks, given.turns, f"{given.seed} a")
            loads = []
            for role, parts in workers.items():
                used = [b - a for a, b in zip(before[role], cpu_s(parts), strict=True)]
                good &= max(used) <= EVEN_BAR * mean(used)
                loads.append(f"{role} {max(used) / mean(used):.2f}")
            row(f"{given.turns} turns", found, "busiest to mean: " + ", ".join(loads))

            client.parts("router")[0].kill()
            await asyncio.sleep(0.5)
            await client.wait_ready(4)
            row("after the router", await client.converse(talks, 1, f"{given.seed} b"), "killed")

            workers["decode"][0].kill()
            await client.wait_ready(3)
            retries = await client.retries()
            found = await client.converse(talks, 1, f"{given.seed} c")
            sent_astray = await client.retries() - retries
            good &= sent_astray == 0
            row("after a decode worker", found, f"killed; {sent_astray:.0f} attempts astray", bar=0)
    finally:
        system.stop()
    return good


def main() -> int:
    """0 when the bars were reached."""
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--conversations", type=int, default=20, help="default: %(default)s")
    out.add_argument("--turns", type=int, default=8, help="of each; default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of prompts and pauses")
    out.add_argument("--model", type=Path, default=default_model_path())
    given = out.parse_args()
    table = Table("", "blocks found", "share", "")
    try:
        good = uvloop.run(measure(given, table))
    except SystemFailed as error:
        sys.stderr.write(f"error: {error}\n")
        good = False
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
