"""The KV pool's memory: one piece, whose blocks the transport reads and writes as bytes."""

from __future__ import annotations

import ctypes
import mmap
from functools import cached_property
from typing import TYPE_CHECKING

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor


class KVCache:
    """`blocks` blocks of `layout`. Who may write which block is the pool's and lease's business.

    Memory starts as the system gives it: a slot holds nothing until a step or a transfer wrote it.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._bytes = memoryview(mmap.mmap(-1, blocks * layout.block_bytes, flags=flags))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no memory for a KV pool of {blocks} blocks of {layout.block_bytes} bytes"
            ) from error

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    @cached_property
    def tensor(self) -> Tensor:
        """The same memory, [NB, L, 2, Hk, BS, D], for code that computes with torch."""
        import torch

        dtype = torch.bfloat16 if self.layout.dtype == "bfloat16" else torch.float32
        return torch.frombuffer(self._bytes, dtype=dtype).view(self.blocks, *self.layout.shape)

    def view(self, first_block: int, count: int) -> memoryview:
        """The bytes of `count` adjacent blocks, writable, without a copy."""
        if first_block < 0 or count < 1 or first_block + count > self.blocks:
            raise IndexError(f"blocks {first_block} to {first_block + count - 1} of {self.blocks}")
        size = self.layout.block_bytes
        return self._bytes[first_block * size : (first_block + count) * size]

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block onto another, in all layers."""
        self.view(destination, 1)[:] = self.view(source, 1)
