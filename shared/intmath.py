"""Integer arithmetic used everywhere; imports nothing."""

from __future__ import annotations


def cdiv(amount: int, unit: int) -> int:
    """How many units of size `unit` hold `amount`, rounded up."""
    return -(-amount // unit)
