"""`kvrelay bench engine`: settings in, a report out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.services.bench.cases import Case, case_work, chosen, step_work
from kvrelay.services.bench.config import OUR_KERNELS, WORKER_FIELDS, BenchConfig
from kvrelay.services.bench.machine import Limits, describe, measure_limits
from kvrelay.services.bench.measure import (
    Cost,
    Report,
    Schedule,
    products_ms,
    run_blocks,
    run_costs,
)
from kvrelay.services.bench.peer_models import peer_model
from kvrelay.services.bench.plot import draw, require_matplotlib
from kvrelay.services.bench.report import AGAIN, OURS, Row, row_of, show
from kvrelay.services.bench.systems import (
    SystemSpec,
    kvrelay_spec,
    peer_environment,
    peer_python,
    running,
)
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.fetch import cache_dir
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.model.load import TORCH_DTYPES
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

LLAMACPP_TOKENS = 8192
"""Its pool: more than the largest case needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was measured."""

    machine: dict[str, object]
    limits: Limits
    rows: list[Row]
    costs: list[Cost]

    def as_json(self) -> dict[str, object]:
        return {
            "machine": {**self.machine, **asdict(self.limits)},
            "rows": [row.as_json() for row in self.rows],
            "costs": [asdict(cost) for cost in self.costs],
        }


def run(config: BenchConfig, worker: WorkerConfig, console: Console) -> None:
    """Measure, and print tables to `console`, or JSON to stdout.

    Raises `BenchError` for a peer, case or picture that cannot be had, `ModelError` for the model.
    """
    if config.plot:
        require_matplotlib()  # now, and not after minutes of measuring
    cases = chosen(config.cases)
    with progress_on_stderr() as report:
        outcome = measure(config, worker, cases, report)
    if config.as_json:
        sys.stdout.write(json.dumps(outcome.as_json(), indent=1) + "\n")
    else:
        show(console, outcome.rows, outcome.costs)
    if config.plot:
        draw(outcome.rows, outcome.machine, Path(config.plot))


def measure(
    config: BenchConfig, worker: WorkerConfig, cases: tuple[Case, ...], report: Report
) -> Outcome:
    report("preparing the model", 0, 0)
    worker = worker.model_copy(update={"role": Role.PREFILL})  # prompts in chunks of its size
    model = read_config(resolve_model(worker.model))
    specs = specs_of(config, worker)
    dtype = TORCH_DTYPES[worker.dtype]
    weight_bytes = step_work(model, dtype.itemsize, [(0, 1)]).weight_bytes
    schedule = Schedule(config.rounds, config.seconds, config.seed)
    logs = cache_dir() / "runs"
    logs.mkdir(parents=True, exist_ok=True)
    with running(specs, logs) as systems:
        for system in systems:
            report(f"loading {system.name}", 0, 0)
            system.load()
        report("measuring this machine", 0, 0)
        limits = measure_limits(worker.compute_threads, dtype, weight_bytes)
        readings = run_blocks(systems, cases, model, schedule, report)
        rows = []
        for case in cases:
            report(f"matrix products of {case.name}", 0, 0)
            alone_ms = products_ms(systems[0], case, worker.step_tokens)
            work = case_work(case, model, dtype.itemsize, worker.step_tokens)
            rows.append(row_of(case, readings[case.name], work, limits, alone_ms))
        costs = run_costs(systems[0], report) if config.costs else []
        about = [system.about for system in systems if system.name != AGAIN]
    machine = {
        **describe(worker.compute_threads),
        "model": worker.model,
        "dtype": worker.dtype,
        "systems": about,
    }
    return Outcome(machine, limits, rows, costs)


def specs_of(config: BenchConfig, worker: WorkerConfig) -> list[SystemSpec]:
    """Ours first, then ours again, then the peers. Raises `BenchError` for one that is not here."""
    ours = worker.model_dump(include={*WORKER_FIELDS, "role"})
    specs = [kvrelay_spec(name, ours) for name in (OURS, AGAIN)]
    for peer in config.peers:
        if peer in OUR_KERNELS:
            specs.append(kvrelay_spec(peer, {**ours, "kernels": peer}))
        else:
            specs.append(peer_spec(peer, worker, config.seed))
    return specs


def peer_spec(peer: str, worker: WorkerConfig, seed: int) -> SystemSpec:
    python = peer_python(peer)
    settings = {
        "model": str(peer_model(peer, resolve_model(worker.model))),
        "dtype": worker.dtype,
        "threads": worker.compute_threads,
        "max_num_seqs": worker.max_num_seqs,
        "tokens": LLAMACPP_TOKENS,
        "seed": seed,
    }
    environment = peer_environment(peer, worker.compute_threads)
    return SystemSpec(peer, python, f"{peer}_driver.py", settings, environment)


@contextmanager
def progress_on_stderr() -> Iterator[Report]:
    """A bar on a terminal, else a line for each new thing that is done."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("starting", total=None)

    def report(what: str, done: int, in_all: int) -> None:
        bar.update(task, description=what, completed=done, total=in_all or None)
        if not console.is_terminal:
            console.print(f"{what} ({done}/{in_all})" if in_all else what, highlight=False)

    with bar:
        yield report
