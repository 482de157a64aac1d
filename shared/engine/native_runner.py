"""Executes plans with the native library: one call computes a whole step, without the GIL.

A row's token and stored keys and values depend on the row alone, bit for bit, for one variant of
the library. It draws by the law of the reference sampler; the runner only hands over places and how
to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.kernels.native.binding import Batch, Drawing, Floats, NativeModel, Pool
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.draws import drawn_tokens, native_draws, wanted_of
from kvrelay.shared.engine.plan import Plan, PlannedRow, RunnerSettings, StepResult
from kvrelay.shared.model.native import NativeKernels, load_native
from kvrelay.shared.model.reader import Progress
from kvrelay.shared.model.weights import open_weights


def load_native_runner(
    source: ModelSource,
    config: ModelConfig,
    cache: KVCache,
    kernels: NativeKernels,
    settings: RunnerSettings,
    progress: Progress | None = None,
) -> NativeRunner:
    """Load the model in the dtype of the cache.

    Raises `ModelError`, or `NativeError` without memory for the weights.
    """
    weights = open_weights(source, config)
    positions = settings.max_model_len
    model = load_native(
        weights, config, cache.layout, kernels, positions=positions, progress=progress
    )
    return NativeRunner(model, cache, settings)


class NativeRunner:
    """A `Runner` on the CPU. The cache is the worker's: transfers write other blocks of it."""

    def __init__(self, model: NativeModel, cache: KVCache, settings: RunnerSettings) -> None:
        self.model = model
        self.cache = cache
        self._pool = Pool(cache.address, cache.blocks)
        self._vocab_limit = min(settings.vocab_limit, model.shape.vocab)
        self._drawn_by: list[object] = []
        self._drawing = Drawing([])

    @property
    def progress(self) -> int:
        return self.model.progress

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        """The KV of all rows is written; rows whose logits are no numbers are in `failed`."""
        for source, destination in plan.copies:
            self.cache.copy_block(source, destination)
        result = StepResult(plan.step)
        if plan.rows:
            self._compute(plan.rows, alone, result)
        return result

    def logits(self, plan: Plan) -> Floats:
        """[T, V]: the logits of every token of the plan. KV is written as by `run`."""
        batch = replace(self._batch(plan.rows), wanted=range(plan.tokens))
        return self.model.step(batch, self._pool)

    def _compute(self, rows: Sequence[PlannedRow], alone: bool, result: StepResult) -> None:
        wanted = [row for row in rows if row.sample or row.told]
        drawing = self._lay_out_draws(wanted)
        self.model.step_and_draw(self._batch(rows), self._pool, drawing, alone=alone)
        drawn_tokens(wanted, drawing, self._vocab_limit, result)

    def _lay_out_draws(self, rows: Sequence[PlannedRow]) -> Drawing:
        """From one decode step to the next only the output indices change."""
        drawn_by: list[object] = []
        for row in rows:
            if row.told:
                return Drawing(native_draws(rows, self._vocab_limit))
            drawn_by += (row.sampling, row.choice, row.banned, row.edits)
        if drawn_by != self._drawn_by:
            self._drawn_by = drawn_by
            self._drawing = Drawing(native_draws(rows, self._vocab_limit))
        self._drawing.at([row.index for row in rows])
        return self._drawing

    def _batch(self, rows: Sequence[PlannedRow]) -> Batch:
        size = self.cache.layout.block_size
        tokens: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        tables: list[int] = []
        wanted: list[int] = []
        for row in rows:
            count = len(row.tokens)
            tokens += row.tokens
            starts.append(row.start)
            counts.append(count)
            tables += row.blocks[: -(-(row.start + count) // size)]
            if row.told:
                first = len(tokens) - count
                wanted += [first + at for at in wanted_of(row)]
            elif row.sample:
                wanted.append(len(tokens) - 1)
        return Batch(tokens, starts, counts, tables, wanted)
