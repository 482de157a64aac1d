"""Executes plans with torch: one forward pass over all tokens of a step, then one sample per row.

A row's tokens and samples depend on the row alone, bit for bit, because every kernel keeps that law
(L1); the runner only has to hand each kernel the tokens in some order and each row its own places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.attention.reference import attention
from kvrelay.kernels.attention.schedule import KEY_TILE, PagedRow, schedule
from kvrelay.kernels.linear.reference import ROW_TILE
from kvrelay.kernels.native.step import LOGIT_ROWS
from kvrelay.kernels.rope.reference import Slots, rope_write
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.draws import draw_tokens, wanted_of
from kvrelay.shared.engine.plan import Plan, PlannedRow, RunnerSettings, StepResult
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.model.llama import Attend, Llama
from kvrelay.shared.model.load import load_llama
from kvrelay.shared.model.reader import Progress
from kvrelay.shared.model.weights import open_weights
from kvrelay.shared.sampling.sampler import Logits


def load_runner(
    source: ModelSource,
    config: ModelConfig,
    cache: KVCache,
    settings: RunnerSettings,
    progress: Progress | None = None,
) -> TorchRunner:
    """Load the model in the dtype of the cache.

    Raises `ModelError`, or `ConfigError` for a block size that the kernels cannot do.
    """
    block_size = cache.layout.block_size
    if KEY_TILE % block_size:
        raise ConfigError(f"block_size: {block_size} tokens, but it must divide {KEY_TILE}")
    torch.set_num_threads(1)  # conversions of small tensors: threads would mostly wait
    model = load_llama(
        open_weights(source, config),
        config,
        cache.layout.dtype,
        positions=settings.max_model_len,
        progress=progress,
    )
    torch.set_num_threads(settings.threads)
    return TorchRunner(model, cache, settings)


class TorchRunner:
    """A `Runner` on the CPU. The cache is the worker's: transfers write other blocks of it."""

    def __init__(self, model: Llama, cache: KVCache, settings: RunnerSettings) -> None:
        self._model = model
        self.cache = cache
        self._vocab_limit = min(settings.vocab_limit, model.config.vocab)
        self._progress = 0

    @property
    def progress(self) -> int:
        return self._progress

    @torch.inference_mode()
    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        """The KV of all rows is written; rows whose logits are no numbers are in `failed`."""
        for source, destination in plan.copies:
            self.cache.copy_block(source, destination)
        result = StepResult(plan.step)
        if plan.rows:
            self._compute(plan.rows, result)
        return result

    @torch.inference_mode()
    def logits(self, plan: Plan) -> Tensor:
        """[T, V] float32: the logits of every token of the plan. KV is written as by `run`."""
        return self._model.logits(self._hidden(plan.rows)[: plan.tokens])

    def _compute(self, rows: Sequence[PlannedRow], result: StepResult) -> None:
        hidden = self._hidden(rows)
        begins = np.cumsum([0] + [len(row.tokens) for row in rows])
        together: list[tuple[PlannedRow, list[int]]] = []
        for row, begin in zip(rows, begins, strict=False):
            if wanted := [int(begin) + at for at in wanted_of(row)]:
                together.append((row, wanted))
        places = [place for _, wanted in together for place in wanted]
        logits = self._logits_at(hidden, places)
        pairs = ((row, [next(logits) for _ in wanted]) for row, wanted in together)
        draw_tokens(pairs, self._vocab_limit, result)

    def _logits_at(self, hidden: Tensor, places: Sequence[int]) -> Iterator[Logits]:
        """Row by row of the logits there, of which few are computed at a time."""
        for first in range(0, len(places), LOGIT_ROWS):
            yield from self._model.logits(hidden[places[first : first + LOGIT_ROWS]]).numpy()

    def _hidden(self, rows: Sequence[PlannedRow]) -> Tensor:
        """[T, E] of all tokens, in row order, and of some more that fill the last row tile."""
        tokens = [token for row in rows for token in row.tokens]
        spare = -len(tokens) % ROW_TILE  # filled once here, and not again before each product
        return self._model.forward(torch.tensor(tokens + [0] * spare), self._attend(rows, spare))

    def _attend(self, rows: Sequence[PlannedRow], spare: int) -> Attend:
        """What the model calls for each layer; the step's last `spare` tokens are no one's."""
        pool, rope = self.cache.tensor, self._model.rope
        paged = [PagedRow(row.start, len(row.tokens), row.blocks) for row in rows]
        slots = _slots(paged, self.cache.layout.block_size)
        tiles = schedule(paged, self.cache.layout.block_size, self._model.config.sliding_window)
        scale = self.cache.layout.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if spare:
                q, k, v = q[:-spare], k[:-spare], v[:-spare]
            turned = rope_write(q, k, v, rope, pool[:, layer], slots)
            self._progress += 1
            return functional.pad(
                attention(turned, pool, layer, tiles, scale), (0, 0, 0, 0, 0, spare)
            )

        return attend


def _slots(rows: Sequence[PagedRow], block_size: int) -> Slots:
    """Positions, blocks and slots of all tokens of a step, in token order."""
    positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
    blocks = np.concatenate(
        [
            np.asarray(row.blocks)[np.arange(row.start, row.start + row.count) // block_size]
            for row in rows
        ]
    )
    return Slots(
        positions=torch.from_numpy(positions),
        blocks=torch.from_numpy(blocks),
        slots=torch.from_numpy(positions % block_size),
    )
