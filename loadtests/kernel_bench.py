"""Steps of the native kernels against the torch reference, interleaved: `--help` has the settings.

A machine is never quiet: a round runs every system on every case in a random order, and what is
claimed is the median over rounds of the ratio within a round. CPU seconds tell what a busy
neighbour cannot change; the best round comes nearest to an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.kernels.native.binding import Library
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.fetch import default_model_path
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.native_runner import NativeRunner, load_native_runner
from kvrelay.shared.engine.plan import Plan, PlannedRow, Runner
from kvrelay.shared.engine.runner import RunnerSettings, load_runner
from kvrelay.shared.kv.layout import DType, KVLayout
from kvrelay.shared.model.native import NativeKernels
from kvrelay.shared.types import SamplingParams

CHUNK_TOKENS = 256
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """`plans` together are one measurement, of `tokens` tokens."""

    name: str
    plans: tuple[Plan, ...]
    repeats: int

    @property
    def tokens(self) -> int:
        return sum(plan.tokens for plan in self.plans)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one case, per pass over its plans."""

    wall_s: float
    cpu_s: float


def decode(batch: int, context: int) -> Case:
    """One step of `batch` requests, each with `context` tokens before it."""
    per_row = context // BLOCK_SIZE + 1
    rows = tuple(
        PlannedRow(
            str(at), [17 + at], context, range(at * per_row, (at + 1) * per_row), True, GREEDY
        )
        for at in range(batch)
    )
    return Case(f"decode_b{batch}_c{context}", (Plan(0, rows),), repeats=5)


def prefill(length: int) -> Case:
    tokens = [(7 * at * at + 3 * at + 11) % 40_000 for at in range(length)]
    blocks = range(length // BLOCK_SIZE + 1)
    plans = tuple(
        Plan(
            0,
            (
                PlannedRow(
                    "a",
                    tokens[first : first + CHUNK_TOKENS],
                    first,
                    blocks,
                    first + CHUNK_TOKENS >= length,
                    GREEDY,
                ),
            ),
        )
        for first in range(0, length, CHUNK_TOKENS)
    )
    return Case(f"prefill_{length}", plans, repeats=1)


def systems(
    model: Path, dtype: DType, threads: int, wanted: list[str]
) -> Iterator[tuple[str, Runner]]:
    """Each with its own pool of small random numbers, so that any position can be computed."""
    source = resolve_model(str(model))
    config = read_config(source)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    library = Library()
    makers: dict[str, Callable[[KVCache, RunnerSettings], Runner]] = {
        "reference": lambda cache, settings: load_runner(source, config, cache, settings)
    }
    for variant in library.variants:
        kernels = NativeKernels(library, variant, threads)
        makers[variant.name.lower()] = lambda cache, settings, kernels=kernels: load_native_runner(
            source, config, cache, kernels, settings
        )
    for name in wanted:
        cache = KVCache(layout, 1024)
        cache.tensor.normal_(std=0.1)
        yield name, makers[name](cache, RunnerSettings(threads, 8192, config.vocab))


def measure(runner: Runner, case: Case) -> Timing:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(case.repeats):
        for plan in case.plans:
            runner.run(plan)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Timing(wall_s / case.repeats, cpu_s / case.repeats)


def row_of(case: Case, timings: dict[str, list[Timing]], base: str) -> dict[str, object]:
    row: dict[str, object] = {"case": case.name, "tokens": case.tokens}
    for name, each in timings.items():
        walls = [timing.wall_s for timing in each]
        ratios = [b.wall_s / t.wall_s for b, t in zip(timings[base], each, strict=True)]
        row[name] = {
            "median_ms": round(1e3 * statistics.median(walls), 2),
            "best_ms": round(1e3 * min(walls), 2),
            "cpu_ms": round(1e3 * min(timing.cpu_s for timing in each), 2),
            "best_tokens_per_s": round(case.tokens / min(walls), 1),
            "times_faster": round(statistics.median(ratios), 2),
        }
    return row


def breakdown(runner: Runner, case: Case) -> dict[str, float]:
    """Milliseconds of one pass by phase; `python` is all that is not inside the library."""
    assert isinstance(runner, NativeRunner)
    before = runner.model.times_ns()
    wall_s = measure(runner, case).wall_s
    spent = {
        name: (ns - before[name]) / 1e6 / case.repeats
        for name, ns in runner.model.times_ns().items()
    }
    spent["python"] = 1e3 * wall_s - sum(spent.values())
    return {name: round(ms, 2) for name, ms in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=f"reference,{Library().variants[-1].name.lower()}")
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--contexts", default="128")
    parser.add_argument("--prefills", default="512,2048")
    given = parser.parse_args()
    numbers = {
        name: [int(number) for number in getattr(given, name).split(",") if number]
        for name in ("batches", "contexts", "prefills")
    }
    cases = [decode(b, c) for b in numbers["batches"] for c in numbers["contexts"]]
    cases += [prefill(length) for length in numbers["prefills"]]
    runners = dict(systems(given.model, given.dtype, given.threads, given.systems.split(",")))
    torch.set_num_threads(given.threads)  # of the reference
    order = random.Random(0)
    for case in cases:
        timings: dict[str, list[Timing]] = {name: [] for name in runners}
        for runner in runners.values():
            measure(runner, case)  # first touch of memory and code
        for _ in range(given.rounds):
            for name in order.sample(list(runners), len(runners)):
                timings[name].append(measure(runners[name], case))
        row = row_of(case, timings, next(iter(runners)))
        natives = {n: r for n, r in runners.items() if isinstance(r, NativeRunner)}
        row["breakdown_ms"] = {n: breakdown(r, case) for n, r in natives.items()}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
