"""The KV pool's memory: one tensor, whose blocks the transport reads and writes as bytes."""

from __future__ import annotations

import torch

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.model.load import TORCH_DTYPES


class KVCache:
    """`blocks` blocks of `layout`. Who may write which block is the pool's and lease's business.

    Memory starts as the system gives it: a slot holds nothing until a step or a transfer wrote it.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        shape = (blocks, *layout.shape)  # [NB, L, 2, Hk, BS, D]
        try:
            self.tensor = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype])
        except RuntimeError as error:
            raise ConfigError(
                f"no memory for a KV pool of {blocks} blocks of {layout.block_bytes} bytes"
            ) from error
        self._bytes: memoryview = self.tensor.view(-1).view(torch.uint8).numpy().data

    def view(self, first_block: int, count: int) -> memoryview:
        """The bytes of `count` adjacent blocks, writable, without a copy."""
        if first_block < 0 or count < 1 or first_block + count > self.blocks:
            raise IndexError(f"blocks {first_block} to {first_block + count - 1} of {self.blocks}")
        size = self.layout.block_bytes
        return self._bytes[first_block * size : (first_block + count) * size]

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block onto another, in all layers."""
        self.tensor[destination] = self.tensor[source]
