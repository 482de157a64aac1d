"""A sender freezes in mid-transfer, its receiver's memory is used again, and it wakes: nothing
that was published changes.

Real workers, two of each role, with small pools. A prefill worker is stopped (SIGSTOP) while its
chunks are on their way; the client of every other round leaves. Others are answered until none of
the blocks that the lost attempt held is free any more; then the worker is woken, and what lies in
those blocks is asked for again. Every answer must be that of an unsplit server.
`python -m loadtests.frozen_sender --help`.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.integration.clients import RawClient, token_ids
from tests.stack import START_S, Process, Stack, metrics, running, until

from kvrelay.services.chaos.report import spread
from kvrelay.services.chaos.tinymodel import write_tiny_model

SENT = 'kvrelay_relay_chunks_total{direction="sent"}'
FREE, QUARANTINED = (f'kvrelay_pool_blocks{{state="{name}"}}' for name in ("free", "quarantined"))
HITS = 'kvrelay_prefix_cache_tokens_total{result="hit"}'
FAULTS = "kvrelay_transfer_faults_total"
LONG_TOKENS, OTHER_TOKENS, ANSWER_TOKENS = 1500, 420, 12
POOL_BLOCKS, BLOCK_BYTES = 160, 64 << 10
OTHERS = 3
"""At a time."""
AGAIN = 6
"""Of the others' last questions, as they are in the caches still."""
TRIES = 20
"""Of a round: a sender may have sent all before it froze."""


class NotSo(Exception):
    """What had to hold did not."""


@dataclass(slots=True)
class Freezes:
    """Each `once` is a round on the same cluster."""

    stack: Stack
    unsplit: Stack
    rng: random.Random
    rounds: int = 0
    answers: int = 0
    hit_tokens: int = 0
    free_s: list[float] = field(default_factory=list)
    """From the client's leaving until decode has let go of what a frozen worker was to fill."""
    faults: Counter[str] = field(default_factory=Counter)

    def once(self) -> None:
        stays = self.rounds % 2 == 0
        with ThreadPoolExecutor(OTHERS) as pool:
            self._round(pool, stays)
        self.rounds += 1

    def _round(self, pool: ThreadPoolExecutor, stays: bool) -> None:
        before = self._faults()
        frozen, long, answer = self._freeze(pool, stays)
        try:
            if answer is not None:
                self._check(long, answer.result())
            else:
                self.free_s.append(until(self._no_quarantine, 5.0, "decode has let go"))
            others = self._use_again(pool)
        finally:
            frozen.kill(signal.SIGCONT)
        until(self.stack.all_seen, START_S, "the one that woke is seen as another")
        hits = self.stack.counted(self.stack.decodes, HITS)
        for prompt in (*others[-AGAIN:], long):
            self._check(prompt, self._ask(prompt))
        self.hit_tokens += self.stack.counted(self.stack.decodes, HITS) - hits
        self.faults += self._faults() - before

    def _freeze(
        self, pool: ThreadPoolExecutor, stays: bool
    ) -> tuple[Process, list[int], Future[str] | None]:
        """Who was stopped in mid-transfer of which prompt; and its answer to come."""
        for _ in range(TRIES):
            long = token_ids(self.rng, LONG_TOKENS)
            sent = {each.name: metrics(each)[SENT] for each in self.stack.prefills}
            client = None if stays else RawClient(self.stack, self._body(long))
            answer = pool.submit(self._ask, long) if stays else None
            sender = self._sender(sent, 1 + self.rng.randrange(4))
            sender.kill(signal.SIGSTOP)
            # Its last chunks may have been under way, and be published soon.
            time.sleep(0.1)  # of the fault: it stays for longer than anything on this host travels
            caught = not self._no_quarantine()
            if client is not None:
                client.leave()
            if caught:
                return sender, long, answer
            sender.kill(signal.SIGCONT)
            if answer is not None:
                self._check(long, answer.result())
            until(self.stack.all_seen, START_S, "all are seen")
        raise NotSo(f"no sender was caught in mid-transfer in {TRIES} tries")

    def _sender(self, sent: dict[str, float], chunks: int) -> Process:
        """The prefill worker that has sent so many more chunks."""
        found: list[Process] = []

        def sends() -> bool:
            found[:] = [
                each
                for each in self.stack.prefills
                if metrics(each)[SENT] >= sent[each.name] + chunks
            ]
            return bool(found)

        until(sends, 10.0, "a prefill worker sends chunks")
        return found[0]

    def _use_again(self, pool: ThreadPoolExecutor) -> list[list[int]]:
        """Others are answered until no block is free: those of the lost attempt were, and are not
        looked for in any cache, as they were never published."""
        asked: list[list[int]] = []
        while any(metrics(each)[FREE] for each in self.stack.decodes):
            prompts = [token_ids(self.rng, OTHER_TOKENS) for _ in range(OTHERS)]
            for prompt, answer in zip(prompts, pool.map(self._ask, prompts), strict=True):
                self._check(prompt, answer)
            asked += prompts
        return asked

    def _no_quarantine(self) -> bool:
        return not any(metrics(each)[QUARANTINED] for each in self.stack.decodes)

    def _faults(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for worker in self.stack.decodes:
            page = metrics(worker)
            counted.update({n: round(v) for n, v in page.items() if n.startswith(FAULTS)})
        return counted

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "seed": 5}

    def _ask(self, prompt: list[int]) -> str:
        return str(self.stack.complete(**self._body(prompt))["choices"][0]["text"])

    def _check(self, prompt: list[int], answer: str) -> None:
        right = str(self.unsplit.complete(**self._body(prompt))["choices"][0]["text"])
        self.answers += 1
        if answer != right:
            raise NotSo(f"round {self.rounds}: {answer!r} instead of {right!r}")


@contextmanager
def freezes(folder: Path, transport: str, seed: int) -> Iterator[Freezes]:
    """A cluster, and an unsplit server beside it. At its end nothing may be held."""
    model = write_tiny_model(folder / "model", layers=8, head_dim=64)
    pool = {"kv_cache_memory_bytes": POOL_BLOCKS * BLOCK_BYTES, "threads": 1}
    shape = {"prefill": 2, "decode": 2, "max_num_batched_tokens": 128, "transport": transport}
    with (
        running(folder / "stack", model, **pool, **shape) as stack,
        running(folder / "unsplit", model, prefill=0, decode=0, **pool) as unsplit,
    ):
        yield Freezes(stack, unsplit, random.Random(seed))
        until(stack.baseline, 5.0, "nothing is held")


def main() -> int:
    """0 when every answer was the right one."""
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--times", type=int, default=50, help="default: %(default)s")
    out.add_argument("--transport", choices=["tcp", "ucx"], default="tcp")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    given = out.parse_args()
    console = Console(width=120)
    with (
        tempfile.TemporaryDirectory() as folder,
        freezes(Path(folder), given.transport, given.seed) as cluster,
    ):
        try:
            for _ in range(given.times):
                begun_s = time.monotonic()
                cluster.once()
                took_s = time.monotonic() - begun_s
                console.print(f"round {cluster.rounds}: {cluster.answers} answers, {took_s:.1f} s")
        except NotSo as problem:
            console.print(f"FAILED  {problem}", markup=False)
            return 1
    console.print(
        f"{cluster.rounds} freezes over {given.transport}: {cluster.answers} right answers"
    )
    console.print(f"tokens found in decode's caches after the awakening: {cluster.hit_tokens}")
    console.print(f"freed after the client left: {spread(cluster.free_s)} s")
    console.print(f"counted by decode: {dict(cluster.faults)}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
