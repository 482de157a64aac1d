"""A file in memory that takes none: what was read of it leaves the process again."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class MappedFile:
    """A file's bytes, mapped for reading for as long as any array made of them is there."""

    def __init__(self, file: Path) -> None:
        """Raises `OSError`, and `ValueError` for an empty file."""
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def leave(self, part: NDArray[np.uint8]) -> None:
        """`part` of `bytes` is not needed soon: its pages no longer count as this process's.

        They stay in the system's cache, and are there again when they are read.
        """
        first = part.ctypes.data - self.bytes.ctypes.data
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, first + part.nbytes - start)
