"""From answers to figures, and from figures of many blocks to claims. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtests.serving.client import Answer

Figures = Mapping[str, float]
"""By name; each name ends in its unit, or is a plain ratio or count."""

OURS, AGAIN = "kvrelay", "kvrelay again"
"""The second is the same servers a second time in each block: the resolution of the run."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def gap_figures(
    answers: Iterable[Answer], first_s: float = 0.0, last_s: float = math.inf
) -> dict[str, float]:
    """Of gaps between events with text, over all streams; those that end in the window."""
    gaps_s = [
        after_s - before_s
        for answer in answers
        for before_s, after_s in pairwise(answer.times_s)
        if first_s <= after_s < last_s
    ]
    return {
        "gap_median_ms": 1e3 * percentile(gaps_s, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps_s, 0.99),
        "gap_max_ms": 1e3 * max(gaps_s, default=math.nan),
    }


def ttft_figures(answers: Iterable[Answer]) -> dict[str, float]:
    times_s = [answer.ttft_s for answer in answers if answer.times_s]
    return {
        "ttft_median_ms": 1e3 * percentile(times_s, 0.5),
        "ttft_p90_ms": 1e3 * percentile(times_s, 0.9),
    }


def whole_figures(answers: Sequence[Answer], begun_s: float) -> dict[str, float]:
    """Of requests that were all waited for: failed ones have taken their time and gave nothing."""
    good = [answer for answer in answers if not answer.error]
    took_s = max(answer.ended_s for answer in answers) - begun_s
    tokens = sum(answer.tokens for answer in good)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / took_s,
        "events_per_token": sum(len(a.times_s) for a in good) / tokens if tokens else math.nan,
        **ttft_figures(good),
        **gap_figures(good),
        "failures": len(answers) - len(good),
    }


def tokens_within(answer: Answer, first_s: float, last_s: float) -> float:
    """Its output tokens in a window: its share of events there, times its tokens."""
    if answer.error or not answer.times_s:
        return 0.0
    inside = sum(first_s <= at_s < last_s for at_s in answer.times_s)
    return answer.tokens * inside / len(answer.times_s)


@dataclass(frozen=True, slots=True)
class Visit:
    """One system, one scenario, one block."""

    block: int
    system: str
    row: str
    figures: Figures


def samples_of(visits: Iterable[Visit], row: str, figure: str) -> dict[str, dict[int, float]]:
    """system -> block -> figure, of blocks that have it."""
    out: dict[str, dict[int, float]] = {}
    for visit in visits:
        if visit.row == row and math.isfinite(visit.figures.get(figure, math.nan)):
            out.setdefault(visit.system, {})[visit.block] = visit.figures[figure]
    return out


def ratios(samples: Mapping[str, Mapping[int, float]], figure: str) -> list[float]:
    """Per block, ours over that of the block's better peer; empty without a peer."""
    better: Callable[[Iterable[float]], float] = min if lower_is_better(figure) else max
    out = []
    for block, ours in samples.get(OURS, {}).items():
        peers = [
            blocks[block]
            for system, blocks in samples.items()
            if system not in (OURS, AGAIN) and blocks.get(block)
        ]
        if peers:
            out.append(ours / better(peers))
    return out


def again_ratios(samples: Mapping[str, Mapping[int, float]]) -> list[float]:
    """Per block, the second pass over the first: what no difference looks like."""
    again = samples.get(AGAIN, {})
    return [again[b] / ours for b, ours in samples.get(OURS, {}).items() if b in again and ours]


def lower_is_better(figure: str) -> bool:
    return not figure.endswith("_per_s")


@dataclass(frozen=True, slots=True)
class Bar:
    """What must hold: of the ratio to the better peer, or of our own figure."""

    row: str
    figure: str
    limit: float
    of_ratio: bool

    def words(self) -> str:
        subject = f"{self.row}: {self.figure}"
        relation = "<=" if lower_is_better(self.figure) else ">="
        return f"{subject}{' / better peer' if self.of_ratio else ''} {relation} {self.limit:g}"

    def holds(self, value: float) -> bool:
        return value <= self.limit if lower_is_better(self.figure) else value >= self.limit

    def values(self, visits: Sequence[Visit]) -> list[float]:
        """Per block; empty where it cannot be told."""
        samples = samples_of(visits, self.row, self.figure)
        if self.of_ratio:
            return ratios(samples, self.figure)
        return list(samples.get(OURS, {}).values())


BARS = (
    Bar("streams1", "tokens_per_s", 1.0, of_ratio=True),
    Bar("streams8", "tokens_per_s", 1.3, of_ratio=True),
    Bar("gap_load", "gap_growth", 2.5, of_ratio=False),
    Bar("gap_load", "long_ttft_median_ms", 1.0, of_ratio=True),
    Bar("gap_load", "tokens_per_s", 1.0, of_ratio=True),
)
