"""Medians of ratios, and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the interval in which it lies with a confidence of `CONFIDENCE`."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """By bootstrap: the spread of the medians of samples drawn from `values` with replacement."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Interval(statistics.median(values), medians[tail], medians[-1 - tail])
