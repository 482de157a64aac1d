"""The compute column as a worker uses it: loaded once, heavy to import."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.kernels.native.binding import VERSION, Library, NativeError, Variant
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.native_runner import load_native_runner
from kvrelay.shared.engine.plan import Runner, RunnerSettings
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import DType
from kvrelay.shared.model.native import NativeKernels
from kvrelay.shared.worker.capacity import Capacity

log = logging.getLogger(__name__)

_VARIANTS = {f"native-{variant.name.lower()}": variant for variant in Variant}


@dataclass(frozen=True, slots=True)
class Compute:
    runner: Runner
    view: Callable[[int, int], memoryview]
    """(first block, count) -> the bytes of adjacent blocks of the KV memory."""
    numerics: str
    """Equal for workers whose results are bit for bit the same."""


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """The worker's settings that say how is computed."""

    kernels: str
    """`kernels` of the worker's configuration."""
    threads: int
    vocab_limit: int
    """Ids from here on are never sampled."""


def load_compute(
    source: ModelSource, model: ModelConfig, capacity: Capacity, settings: ComputeSettings
) -> Compute:
    """Read the weights and make the KV memory. Raises `ModelError` or `ConfigError`."""
    begun_s = time.monotonic()
    native = choose_kernels(settings.kernels, settings.threads)
    cache = KVCache(capacity.layout, capacity.blocks)
    runs = RunnerSettings(settings.threads, capacity.max_model_len, settings.vocab_limit)
    progress = Bar() if sys.stderr.isatty() else None
    runner: Runner
    if native is None:
        from kvrelay.shared.engine.runner import load_runner  # torch, which takes seconds

        runner = load_runner(source, model, cache, runs, progress)
    else:
        try:
            runner = load_native_runner(source, model, cache, native, runs, progress)
        except NativeError as error:
            raise ConfigError(f"model: {error}") from error
    cache.populate()  # after the weights, which a start waits for
    numerics = numerics_id(native, capacity.layout.dtype)
    log.info("weights loaded in %.1f s; computing with %s", time.monotonic() - begun_s, numerics)
    return Compute(runner, cache.view, numerics)


def choose_kernels(kernels: str, threads: int) -> NativeKernels | None:
    """What the setting means on this machine; None is the torch reference.

    Raises `ConfigError` for a native variant that was asked for by name and cannot be had. What
    `auto` cannot have is one line in the log.
    """
    if kernels == "reference":
        return None
    try:
        library = Library()
    except NativeError as error:
        if kernels != "auto":
            raise ConfigError(f"kernels: {kernels} cannot be used: {error}") from error
        log.warning("no native kernels, steps take several times as long: %s", error)
        return None
    if kernels == "auto":
        best = library.variants[-1]
        # Portable code is slower than the vendor's library that the reference calls.
        return None if best is Variant.PORTABLE else NativeKernels(library, best, threads)
    variant = _VARIANTS[kernels]
    if variant not in library.variants:
        able = ", ".join(f"native-{each.name.lower()}" for each in library.variants)
        raise ConfigError(f"kernels: {kernels} cannot run on this processor, which has {able}")
    return NativeKernels(library, variant, threads)


def numerics_id(native: NativeKernels | None, dtype: DType) -> str:
    """The code path taken here, and the version of it."""
    if native is not None:
        return f"native-{native.variant.name.lower()}-v{VERSION}"
    from kvrelay.kernels.numerics import numerics_id as reference_numerics_id
    from kvrelay.shared.model.load import TORCH_DTYPES

    return reference_numerics_id(TORCH_DTYPES[dtype])


class Bar:
    """A progress bar on stderr that begins only when loading takes long enough to notice."""

    def __init__(self) -> None:
        from rich.progress import Progress

        self._bar = Progress(transient=True)
        self._task = self._bar.add_task("loading weights")
        self._begun_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() - self._begun_s > 2.0 and not self._bar.live.is_started:
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)
        if done_bytes >= total_bytes:
            self._bar.stop()
