"""How long a client that left is still paid for: until all blocks are free, in every phase (L6).

One worker of each role, prompts in small chunks. Clients leave one after the other, each when its
request is in the phase: as the workers tell it, to the last leg and block; and as the router
counts it (`kvrelay_time_to_free_seconds`). `python -m loadtests.leaving --help`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table
from tests.integration.clients import RawClient, token_ids
from tests.integration.test_leaving import COMPUTED, PHASES, WAITING, Phase
from tests.stack import Process, Stack, at_least, metrics, metrics_at, running, until

from kvrelay.services.chaos.report import spread
from kvrelay.services.chaos.tinymodel import write_tiny_model
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen.relay_pb2_grpc import WorkerStub

LIMIT_S = 1.0
SEATS, AT_A_TIME = 8, 5
"""Of decode; and how many clients come and go while they are taken."""
TRIES = 5
GIVEN_UP_S = 30.0
RUNNING = "kvrelay_requests_running"
BUCKETS = 'kvrelay_time_to_free_seconds_bucket{end="cancelled",le="'


@dataclass(frozen=True, slots=True)
class Measured:
    phase: str
    seconds: list[float]
    """By the workers."""
    routers_p99_s: float
    """No more than this, by the router's histogram."""


class Workers:
    """What each holds, asked over one connection each."""

    def __init__(self, workers: list[Process], stack: ExitStack) -> None:
        channels = [grpc.insecure_channel(str(each.detail["address"])) for each in workers]
        for channel in channels:
            stack.callback(channel.close)
        self._stubs: list[Any] = [WorkerStub(each) for each in channels]  # type: ignore[no-untyped-call]

    def held(self) -> list[tuple[int, int, int]]:
        """Of each worker: legs in any phase, blocks in use, blocks in quarantine."""
        told = [stub.Inspect(pb.InspectRequest(), timeout=5) for stub in self._stubs]
        return [(each.legs, each.in_use_blocks, each.quarantined_blocks) for each in told]

    def back_to(self, before: list[tuple[int, int, int]]) -> Callable[[], bool]:
        """Other requests may go on meanwhile, and grow."""
        others = any(legs for legs, _, _ in before)

        def there() -> bool:
            pairs = [*zip(self.held(), before, strict=True)]
            if others:
                return all(now[0] <= then[0] for now, then in pairs)
            return all(now == then for now, then in pairs)

        return there


def in_phase(stack: Stack, name: str, phase: Phase, number: int, rng: random.Random) -> RawClient:
    """A client whose request is in that phase now; some are there but for a moment."""
    worker = (stack.prefills if phase.role == "prefill" else stack.decodes)[0]
    start = metrics(worker)[phase.counter]
    prompt = token_ids(rng, phase.prompt_tokens)
    stream = number % 2 == 0 or bool(phase.events)
    body = {"prompt": prompt, "max_tokens": phase.max_tokens, "ignore_eos": True, "stream": stream}
    client = RawClient(stack, body)
    if phase.events:
        client.read_events(phase.events)
    else:
        until(at_least(worker, phase.counter, start + phase.after), 10.0, name)
    return client


def queued(stack: Stack, number: int, rng: random.Random) -> RawClient:
    """Behind those that take every seat at decode."""
    body = {"prompt": token_ids(rng, 64), "max_tokens": 4, "stream": number % 2 == 0}
    client = RawClient(stack, body)
    for worker in stack.workers:
        until(at_least(worker, WAITING, 1), 5.0, "it waits on both workers")
    return client


def left_in(
    stack: Stack, workers: Workers, name: str, phase: Phase, rng: random.Random, times: int
) -> Iterator[float]:
    worker = (stack.prefills if phase.role == "prefill" else stack.decodes)[0]
    hits = 0
    for number in range(TRIES * times):
        before, start = workers.held(), metrics(worker)[phase.counter]
        client = in_phase(stack, name, phase, number, rng)
        client.leave(reset=number % 4 < 2)
        took_s = until(workers.back_to(before), GIVEN_UP_S, f"all is free again: {name}")
        # Who left too late for the phase was answered, and does not count.
        if metrics(worker)[phase.counter] - start < phase.whole:
            yield took_s
            hits += 1
        if hits == times:
            return


def left_queued(stack: Stack, workers: Workers, rng: random.Random, times: int) -> Iterator[float]:
    for first in range(0, times, AT_A_TIME):
        with seats_taken(stack, workers):
            for number in range(first, min(first + AT_A_TIME, times)):
                before, computed = workers.held(), stack.counted(stack.workers, COMPUTED)
                client = queued(stack, number, rng)
                client.leave(reset=number % 4 < 2)
                yield until(workers.back_to(before), GIVEN_UP_S, "all is free again: queued")
                assert stack.counted(stack.workers, COMPUTED) == computed, "it was only queued"
        until(stack.baseline, GIVEN_UP_S, "those who had the seats have left")


def measure(stack: Stack, workers: Workers, given: argparse.Namespace) -> Iterator[Measured]:
    rng = random.Random(given.seed)
    ways = {"queued": left_queued(stack, workers, rng, given.times)} | {
        name: left_in(stack, workers, name, phase, rng, given.times)
        for name, phase in PHASES.items()
    }
    for name, way in ways.items():
        histogram = buckets(stack)
        seconds = [*way]
        yield Measured(name, seconds, p99_of(histogram, buckets(stack)))


@contextmanager
def seats_taken(stack: Stack, workers: Workers) -> Iterator[None]:
    """Eight choices that run for long have all that decode gives."""
    body = {"prompt": [7, 8, 9], "n": SEATS, "max_tokens": 7000, "ignore_eos": True, "stream": True}
    client = RawClient(stack, body)
    until(at_least(stack.decodes[0], RUNNING, SEATS), 10.0, "eight choices run")
    until(lambda: workers.held()[0][0] == 0, 10.0, "prefill has handed all over")
    yield
    assert metrics(stack.decodes[0])[RUNNING] == SEATS, "they still run"
    client.leave()


def buckets(stack: Stack) -> dict[float, float]:
    page = metrics_at(f"{stack.url}/metrics")
    return {
        float(name.removeprefix(BUCKETS).partition('"')[0]): value
        for name, value in page.items()
        if name.startswith(BUCKETS)
    }


def p99_of(before: dict[float, float], after: dict[float, float]) -> float:
    """The end of the bucket that it lies in."""
    grown = {le: after[le] - before[le] for le in sorted(after)}
    count = max(grown.values())
    return next(le for le, value in grown.items() if value >= 0.99 * count)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Stack, Workers]]:
    model = write_tiny_model(folder / "model", head_dim=64, max_position_embeddings=16_384)
    shape = {"threads": 1, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}
    with (
        running(folder / "stack", model, max_num_batched_tokens=32, **shape) as stack,
        ExitStack() as channels,
    ):
        yield stack, Workers(stack.workers, channels)


def main() -> int:
    """0 when the p99 is under a second in every phase."""
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--times", type=int, default=200, help="of a phase; default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    given = out.parse_args()
    table = Table("left while", "clients", "p50 s", "p99 s", "most s", "by the router: p99 s")
    late = False
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as (stack, workers):
        for each in measure(stack, workers, given):
            told = spread(each.seconds)
            figures = [f"{told[name]:.3f}" for name in ("p50", "p99", "max")]
            bound = f"<= {each.routers_p99_s:g}"
            table.add_row(each.phase, f"{told['count']}", *figures, bound)
            late |= max(told["p99"], each.routers_p99_s) > LIMIT_S or told["count"] < given.times
    Console(width=120).print(table)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
