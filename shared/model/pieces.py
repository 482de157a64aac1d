"""Tensors on their way from a file into a model: a few rows at a time, so that none is held twice.

A piece stays in a core's cache while it is dequantised, checked and rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
"""Bfloat16, which numpy does not have, by its bits."""

PIECE_VALUES = 1 << 15
"""About so many numbers are a piece, and at least one row is."""

LARGEST_BF16 = float(np.array([0x7F7F7FFF], np.uint32).view(np.float32)[0])
"""The largest float32 that does not become infinite when it is rounded to bfloat16."""


def cut_rows(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a tensor of this shape, piece by piece. A vector is one row."""
    rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], int(np.prod(shape[1:])))
    step = max(1, PIECE_VALUES // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def widened(bits: Halves) -> Floats:
    """Bfloat16 as float32: the same numbers."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def rounded(values: Floats) -> Halves:
    """Float32 to the nearest bfloat16, ties to even. The values must not be NaN."""
    bits = values.view(np.uint32)
    carry = bits >> np.uint32(16)
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)
    carry += bits
    carry >>= np.uint32(16)
    return carry.astype(np.uint16)


def within(values: Floats, limit: float) -> bool:
    """Whether all are numbers of at most this size."""
    return not values.size or bool(-limit <= values.min() and values.max() <= limit)
