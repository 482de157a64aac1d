"""The KV pool's memory."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest
from tests.stack import until

from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.kv.layout import KVLayout

LAYOUT = KVLayout(layers=4, kv_heads=8, block_size=16, head_dim=64, dtype="bfloat16")
BLOCKS = 80
BYTES = LAYOUT.block_bytes * BLOCKS


def resident_bytes(cache: KVCache) -> int:
    pages = (ctypes.c_ubyte * (BYTES // mmap.PAGESIZE))()
    library = ctypes.CDLL(None)
    assert library.mincore(ctypes.c_void_p(cache.address), ctypes.c_size_t(BYTES), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.leaks_allowed  # the thread, which ends by itself
def test_all_of_it_is_there_soon_and_nothing_that_was_written_changes() -> None:
    cache = KVCache(LAYOUT, BLOCKS)
    block = bytes(range(256)) * (LAYOUT.block_bytes // 256)
    cache.view(3, 1)[:] = block
    before = threading.active_count()
    cache.populate()
    until(lambda: resident_bytes(cache) >= BYTES, 20, "the pool is in memory")
    until(lambda: threading.active_count() <= before, 5, "its thread has ended")
    assert bytes(cache.view(3, 1)) == block
    assert not any(cache.view(4, 1))
