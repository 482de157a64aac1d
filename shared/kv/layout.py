"""The shape of KV memory: what one block holds, in which order, and how many bytes that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["bfloat16", "float32"]
ITEM_BYTES: dict[DType, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Block-major `[block][layer][K|V][kv_head][slot][dim]`: a block is one contiguous piece."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: DType

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of one block: (layers, 2, kv_heads, block_size, head_dim)."""
        return (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size
