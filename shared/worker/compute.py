"""The compute column as a worker uses it: loaded once, heavy to import."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.plan import Runner
from kvrelay.shared.engine.runner import RunnerSettings, load_runner
from kvrelay.shared.worker.capacity import Capacity

log = logging.getLogger(__name__)

NUMERICS_VERSION = 1
"""Raised when a change of ours may change the bits of a result."""


@dataclass(frozen=True, slots=True)
class Compute:
    runner: Runner
    view: Callable[[int, int], memoryview]
    """(first block, count) -> the bytes of adjacent blocks of the KV memory."""
    numerics: str
    """Equal for workers whose results are bit for bit the same."""


def load_compute(
    source: ModelSource, model: ModelConfig, capacity: Capacity, threads: int, vocab_limit: int
) -> Compute:
    """Read the weights and make the KV memory. Raises `ModelError` or `ConfigError`."""
    begun_s = time.monotonic()
    cache = KVCache(capacity.layout, capacity.blocks)
    settings = RunnerSettings(threads, capacity.max_model_len, vocab_limit)
    runner = load_runner(source, model, cache, settings, Bar() if sys.stderr.isatty() else None)
    log.info("weights loaded in %.1f s", time.monotonic() - begun_s)
    return Compute(runner, cache.view, numerics_id())


def numerics_id() -> str:
    """The code path that the CPU library takes here, and the version of it and of ours."""
    capability = torch.backends.cpu.get_cpu_capability()
    amx = torch.cpu._is_amx_tile_supported()
    return f"torch-{torch.__version__}-{capability}{'-amx' if amx else ''}-v{NUMERICS_VERSION}"


class Bar:
    """A progress bar on stderr that begins only when loading takes long enough to notice."""

    def __init__(self) -> None:
        from rich.progress import Progress

        self._bar = Progress(transient=True)
        self._task = self._bar.add_task("loading weights")
        self._begun_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() - self._begun_s > 1.0 and not self._bar.live.is_started:
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)
        if done_bytes >= total_bytes:
            self._bar.stop()
