"""Workers are started again and again under load: nobody else has to be, and no answer is harmed.

Two workers of each role. The second of each is killed or asked to end, by turns, and started again;
the first of each and the router stay, and must not grow. `python -m loadtests.restarts --help`.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.integration.clients import token_ids
from tests.integration.test_warming import connections
from tests.stack import START_S, Process, Stack, metrics, running, until
from tests.system.load import Load

from kvrelay.services.chaos.report import GROWTH_BYTES, GROWTH_COUNT, spread
from kvrelay.services.chaos.tinymodel import write_tiny_model
from kvrelay.services.chaos.watch import Size, size_of

RELAYED = "kvrelay_relay_blocks_total"
HOW = signal.SIGKILL, signal.SIGTERM
WARM = 5
"""Restarts before the sizes are looked at that may not grow."""
ANSWERS = 3
"""Of the load, between two restarts."""


@dataclass(slots=True)
class Seen:
    """What went as it should not, and how long it took."""

    back_s: list[float] = field(default_factory=list)
    """From the start until the router can use the worker."""
    problems: list[str] = field(default_factory=list)


class Restarts:
    def __init__(self, stack: Stack, load: Load, seed: int) -> None:
        self._stack, self._load = stack, load
        self._rng = random.Random(seed)
        self.seen = Seen()
        self.stay = [stack.router, stack.prefills[0], stack.decodes[0]]
        self.pids = [part.pid for part in self.stay]

    def once(self, number: int) -> None:
        stack, how = self._stack, HOW[number // 2 % 2]
        again, peers = (
            (stack.prefills[1], stack.decodes),
            (stack.decodes[1], stack.prefills),
        )[number % 2]
        again.end(how, seconds=60)
        begun_s = time.monotonic()
        again.start()
        until(stack.all_seen, START_S, f"{again.name} is used again")
        self.seen.back_s.append(time.monotonic() - begun_s)
        there = [connections(again, peer) for peer in peers]
        self._until_used(again)
        now = [connections(again, peer) for peer in peers]
        if not all(there) or now != there:
            self.seen.problems.append(f"restart {number}: {there} connections, {now} after work")
        self._load.wait_answers(ANSWERS)

    def _until_used(self, worker: Process) -> None:
        """Until its relay has carried something."""

        def used() -> bool:
            prompt = token_ids(self._rng, 100)
            self._stack.complete(prompt, max_tokens=2, ignore_eos=True)
            page = metrics(worker)
            return any(value for name, value in page.items() if name.startswith(RELAYED))

        until(used, START_S, f"{worker.name} relays")

    def sizes(self) -> list[Size]:
        return [size_of(part.pid) for part in self.stay]


def measure(given: argparse.Namespace, console: Console, folder: Path) -> list[str]:
    """What did not hold."""
    model = write_tiny_model(folder / "model")
    shape = {"prefill": 2, "decode": 2, "threads": 1, "kv_cache_memory_bytes": 16 << 20}
    env = {"UCX_TLS": "tcp"}  # so that UCX's connections can be counted, too
    with (
        running(folder / "stack", model, transport=given.transport, env=env, **shape) as stack,
        Load(stack.url, stack.model) as load,
    ):
        restarts = Restarts(stack, load, given.seed)
        for number in range(given.times):
            if number == WARM:
                before = restarts.sizes()
            restarts.once(number)
            console.print(f"{number + 1}: back after {restarts.seen.back_s[-1]:.2f} s")
        after = restarts.sizes()
        pids = [part.pid for part in restarts.stay if part.popen and part.popen.poll() is None]
    problems = [*restarts.seen.problems]
    if pids != restarts.pids:
        problems.append("one of those that stay did not")
    problems += [f"{count} x {what}" for what, count in load.wrong().items()]
    out = Table("stays", "MiB", "descriptors", "threads")
    for part, then, now in zip(restarts.stay, before, after, strict=True):
        grown = now.rss_bytes - then.rss_bytes
        out.add_row(
            part.name,
            f"{now.rss_bytes / 2**20:.0f} ({grown / 2**20:+.1f})",
            f"{now.descriptors} ({now.descriptors - then.descriptors:+d})",
            f"{now.threads} ({now.threads - then.threads:+d})",
        )
        more = max(now.descriptors - then.descriptors, now.threads - then.threads)
        if grown > GROWTH_BYTES or more > GROWTH_COUNT:
            problems.append(f"{part.name} grew")
    console.print(out)
    console.print(
        f"{given.times} restarts over {given.transport}: {spread(restarts.seen.back_s)} s"
    )
    console.print(f"{load.done} answers, the longest pause in one {load.longest_gap_s:.2f} s")
    return problems


def main() -> int:
    """0 when nothing failed, no token was wrong and nobody grew."""
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--times", type=int, default=50, help="default: %(default)s")
    out.add_argument("--transport", choices=["tcp", "ucx"], default="tcp")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    given = out.parse_args()
    if given.times <= WARM:
        out.error(f"--times: must be more than {WARM}, got {given.times}")
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        problems = measure(given, console, Path(folder))
    for problem in problems:
        console.print(f"FAILED  {problem}", markup=False)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
