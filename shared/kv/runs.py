"""Runs of adjacent blocks: one run is one contiguous piece, so one message on the wire."""

from __future__ import annotations

from collections.abc import Sequence


def run_lengths(blocks: Sequence[int]) -> list[int]:
    """Lengths of the maximal runs of ascending adjacent ids; they add up to `len(blocks)`."""
    lengths: list[int] = []
    for i, block in enumerate(blocks):
        if i > 0 and block == blocks[i - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths
