"""How much KV memory a worker has, and what that means for requests: decided once, at start."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Capacity:
    """The pool of one worker."""

    layout: KVLayout
    blocks: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.layout.block_size

    def describe(self) -> str:
        longest = self.tokens / self.max_model_len
        return (
            f"KV memory: {self.blocks} blocks of {self.layout.block_size} tokens, "
            f"{self.tokens} tokens in {self.blocks * self.layout.block_bytes / 2**20:.0f} MiB; "
            f"{longest:.1f} requests of {self.max_model_len} tokens at once"
        )


def worker_capacity(config: WorkerConfig, model: ModelConfig) -> Capacity:
    """The pool of a worker with these settings. Raises `ConfigError`."""
    layout = KVLayout(model.layers, model.kv_heads, model.head_dim, config.block_size, config.dtype)
    memory_bytes = int(config.kv_cache_memory_bytes)
    return plan_capacity(layout, memory_bytes, model.max_positions, config.max_model_len)


def plan_capacity(
    layout: KVLayout, memory_bytes: int, model_positions: int, wanted_len: int | None
) -> Capacity:
    """The pool that fits in `memory_bytes`. A request that is accepted later always fits in it.

    Raises `ConfigError` when the longest request could not be held, or is longer than the model's
    own limit.
    """
    blocks = memory_bytes // layout.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {memory_bytes} bytes hold no block of {layout.block_bytes} bytes"
        )
    tokens = blocks * layout.block_size
    if wanted_len is not None and wanted_len > model_positions:
        raise ConfigError(
            f"max_model_len: {wanted_len} is more than the model's {model_positions} positions"
        )
    if wanted_len is not None and wanted_len > tokens:
        raise ConfigError(
            f"max_model_len: {wanted_len} tokens do not fit in kv_cache_memory: {memory_bytes} "
            f"bytes hold {tokens} tokens; raise kv_cache_memory or lower max_model_len"
        )
    max_model_len = wanted_len or min(model_positions, tokens)
    return Capacity(layout, blocks, max_model_len)
