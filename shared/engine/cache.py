"""The KV pool's memory: one piece, whose blocks the transport reads and writes as bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 4 << 20
"""About 10 ms each, as a process that ends waits for the one that is under way."""


class KVCache:
    """`blocks` blocks of `layout`. Who may write which block is the pool's and lease's business.

    Memory starts as the system gives it: a slot holds nothing until a step or a transfer wrote it.
    It stands in the address space alone until then, or until `populate` has been over it.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, blocks * layout.block_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no memory for a KV pool of {blocks} blocks of {layout.block_bytes} bytes"
            ) from error
        self._bytes = memoryview(self._map)

    def populate(self) -> None:
        """Have all of it put into memory, in a thread of least priority that nobody awaits.

        The system gives a page when it is first written, at 2.5 ms a MiB on a virtual machine: a
        prompt of 2,000 tokens in blocks that were never used took a fifth longer. Large pages must
        be asked for before that: what computes asks only in its first step.
        """
        with suppress(OSError):  # a kernel without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        threading.Thread(target=self._populate, name="kvrelay-populate", daemon=True).start()

    def _populate(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        library, size = ctypes.CDLL(None), len(self._map)
        for at in range(0, size, _PIECE_BYTES):
            place = ctypes.c_void_p(self.address + at)
            count = ctypes.c_size_t(min(_PIECE_BYTES, size - at))
            if library.madvise(place, count, _MADV_POPULATE_WRITE) != 0:
                return  # before Linux 5.14: pages come when they are written

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
