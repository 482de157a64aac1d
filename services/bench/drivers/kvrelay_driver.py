"""kvrelay's engine as a worker runs it, without its threads: plan, run, complete, by turns."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay import __version__
from kvrelay.kernels.native.binding import NativeModel
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.messages import Cancel, Instruction, Serve, TokenOut
from kvrelay.shared.engine.native_runner import NativeRunner
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, PlannedRow, Runner
from kvrelay.shared.engine.rows import work_of_rows
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.intmath import cdiv
from kvrelay.shared.types import LegRef, LegSpec, SamplingParams
from kvrelay.shared.worker.capacity import Capacity, worker_capacity
from kvrelay.shared.worker.compute import ComputeSettings, load_compute
from kvrelay.shared.worker.config import WorkerConfig

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class KvrelaySystem:
    about: dict[str, Any]
    engine: Engine
    runner: Runner
    pace: Pace
    capacity: Capacity
    kv_bytes: memoryview
    """All of the pool."""
    runs: int = 0
    refs: dict[LegRef, int] = field(default_factory=dict)

    def begin(self, prompts: list[list[int]], outputs: int) -> None:
        self.runs += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=outputs)
        for at, prompt in enumerate(prompts):
            ref = LegRef(f"{self.runs}/{at}", 0, at)
            self.refs[ref] = at
            self.engine.handle(Serve("", ref, LegSpec(ref.leg, tuple(prompt), sampling), False))

    def advance(self) -> list[int]:
        plan, out = self.engine.plan(self.pace.budget(self.engine.state.streams))
        if plan is None:
            raise RuntimeError(f"nothing can be computed: {out}")
        begun_ns = time.monotonic_ns()
        result = self.runner.run(plan)
        elapsed_ns = time.monotonic_ns() - begun_ns
        outputs_only = all(len(row.tokens) == 1 for row in plan.rows)
        work = work_of_rows(plan.rows, self.engine.state.limits.even_context)
        self.pace.observe(work, elapsed_ns, elapsed_ns, outputs_only=outputs_only)
        return self._tokens(self.engine.complete(plan, result))

    def _tokens(self, out: list[Instruction]) -> list[int]:
        return [self.refs[each.ref] for each in out if isinstance(each, TokenOut)]

    def drop(self) -> None:
        for ref in self.refs:
            self.engine.handle(Cancel(ref))
        self.refs.clear()

    def phases_s(self) -> dict[str, float]:
        model = self._native()
        return {} if model is None else {n: ns / 1e9 for n, ns in model.times_ns().items()}

    def _native(self) -> NativeModel | None:
        return self.runner.model if isinstance(self.runner, NativeRunner) else None

    def products(self, counts: list[int], logits: bool, steps: int) -> dict[str, float | None]:
        """Median seconds of the matrix products of a step, timed in the library (None without it)
        in steps that do little else: each request computes its first `counts[i]` tokens."""
        if self._native() is None:
            return {"products_s": None}
        rows = (self._row(at, 0, count, logits) for at, count in enumerate(counts))
        plan = Plan(0, tuple(rows))
        spent = []
        for _ in range(steps):
            before_s = self.phases_s()["products"]
            self.runner.run(plan)
            spent.append(self.phases_s()["products"] - before_s)
        return {"products_s": median(spent)}

    def bare_step(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Median seconds of a step of one token each of `batch` requests behind `context`."""
        plan = Plan(0, tuple(self._row(at, context, 1, True) for at in range(batch)))
        walls = []
        for _ in range(steps):
            begun_s = time.perf_counter()
            self.runner.run(plan)
            walls.append(time.perf_counter() - begun_s)
        return {"wall_s": median(walls)}

    def _row(self, at: int, context: int, count: int, logits: bool) -> PlannedRow:
        """Request `at` of a step, in blocks of its own."""
        each = cdiv(context + count, self.capacity.layout.block_size)
        blocks = range(at * each, (at + 1) * each)
        return PlannedRow(str(at), [17 + at] * count, context, blocks, logits, GREEDY)

    def fill(self) -> dict[str, int]:
        """Small random numbers in all blocks: memory that was never written costs nothing to read.
        What was cached there is lost."""
        layout = self.capacity.layout
        values = np.random.default_rng(0).standard_normal(layout.block_bytes, np.float32) / 10
        item = layout.block_bytes // int(np.prod(layout.shape))
        block: NDArray[np.uint8] = values.view(np.uint8).reshape(-1, 4)[:, 4 - item :].reshape(-1)
        pool = np.frombuffer(self.kv_bytes, np.uint8).reshape(-1, layout.block_bytes)
        pool[:] = block[: layout.block_bytes]
        return {"tokens": self.capacity.tokens}


def open_system(settings: dict[str, Any]) -> KvrelaySystem:
    config = WorkerConfig.model_validate(settings)
    source = resolve_model(config.model)
    model = read_config(source)
    capacity = worker_capacity(config, model)
    wanted = ComputeSettings(config.kernels, config.compute_threads, model.vocab)
    compute = load_compute(source, model, capacity, wanted)
    limits = EngineLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        max_model_len=capacity.max_model_len,
        vocab_size=model.vocab,
        salt=b"bench",
        even_context=model.even_context,
    )
    gc.collect()
    gc.freeze()  # as a worker does
    return KvrelaySystem(
        about={
            "name": "kvrelay",
            "version": __version__,
            "numerics": compute.numerics,
            "block_size": config.block_size,
            "max_model_len": capacity.max_model_len,
        },
        engine=Engine(limits, capacity.blocks),
        runner=compute.runner,
        pace=Pace(config.step_tokens, config.block_size, config.target_step_ms * 1_000_000),
        capacity=capacity,
        kv_bytes=compute.view(0, capacity.blocks),
    )
