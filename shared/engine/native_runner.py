"""Executes plans with the native library: one call computes a whole step, without the GIL.

A row's token and stored keys and values depend on the row alone, bit for bit, for one variant of
the library. It draws by the law of the reference sampler; the runner only hands over places and how
to draw.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kernels.native.binding import Batch, Floats, NativeModel, Pool
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.clock import Clock, SystemClock
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.draws import drawn_tokens, native_draw
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

    def __init__(
        self,
        model: NativeModel,
        cache: KVCache,
        settings: RunnerSettings,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._pool = Pool(cache.address, cache.blocks)
        self._vocab_limit = min(settings.vocab_limit, model.shape.vocab)
        self._clock = clock or SystemClock()

    @property
    def progress(self) -> int:
        return self.model.progress

    def run(self, plan: Plan) -> StepResult:
        """The KV of all rows is written; rows whose logits are no numbers are in `failed`."""
        started_ns = self._clock.now_ns()
        for source, destination in plan.copies:
            self.cache.copy_block(source, destination)
        sampled, failed = self._compute(plan.rows) if plan.rows else ({}, {})
        return StepResult(plan.step, sampled, self._clock.now_ns() - started_ns, failed)

    def logits(self, plan: Plan) -> Floats:
        """[T, V]: the logits of every token of the plan. KV is written as by `run`."""
        return self.model.step(self._batch(plan.rows, range(plan.tokens)), self._pool)

    def _compute(self, rows: Sequence[PlannedRow]) -> tuple[dict[str, int], dict[str, str]]:
        drawing: list[PlannedRow] = []
        wanted: list[int] = []
        end = 0
        for row in rows:
            end += len(row.tokens)
            if row.sample:
                drawing.append(row)
                wanted.append(end - 1)
        draws = [native_draw(row, self._vocab_limit) for row in drawing]
        drawn = self.model.step_and_draw(self._batch(rows, wanted), self._pool, draws)
        return drawn_tokens(drawing, drawn, self._vocab_limit)

    def _batch(self, rows: Sequence[PlannedRow], wanted: Sequence[int]) -> Batch:
        size = self.cache.layout.block_size
        tables: list[int] = []
        for row in rows:
            tables += row.blocks[: -(-(row.start + len(row.tokens)) // size)]
        return Batch(
            tokens=[token for row in rows for token in row.tokens],
            starts=[row.start for row in rows],
            counts=[len(row.tokens) for row in rows],
            tables=tables,
            wanted=wanted,
        )
