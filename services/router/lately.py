"""The last minute as numbers: tokens and requests by the second, how long first tokens and the gaps
between tokens took, and what was relayed between whom.

A ring of a minute's seconds, each with counts in buckets of about 3 %: bounded whatever comes, and
a token costs one addition.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

SECONDS: Final = 60
RATE_S: Final = 10
"""Over so many whole seconds a rate is taken."""
MOST_PAIRS: Final = 1024
"""Beyond it the oldest is forgotten."""
_FINE: Final = 4
"""Bits of a duration below its highest one that a bucket keeps."""


def bucket_of(ns: int) -> int:
    """Durations of one bucket differ by at most a sixteenth."""
    shift = max(ns.bit_length() - _FINE - 1, 0)
    return (shift << (_FINE + 1)) + (ns >> shift)


def middle_ns(bucket: int) -> float:
    """Of the durations in a bucket."""
    shift, head = bucket >> (_FINE + 1), bucket & ((1 << (_FINE + 1)) - 1)
    return (head + 0.5) * (1 << shift) if shift else float(head)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of durations, in seconds; None where there were none."""

    count: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


def spread(buckets: Counter[int]) -> Spread:
    total = buckets.total()
    if not total:
        return Spread(0, None, None, None)
    values = [_at(buckets, total * part / 100) for part in (50, 90, 99)]
    return Spread(total, *(value / 1e9 for value in values))


def _at(buckets: Counter[int], rank: float) -> float:
    passed, bucket = 0, 0
    for bucket in sorted(buckets):
        passed += buckets[bucket]
        if passed >= rank:
            break
    return middle_ns(bucket)


@dataclass(slots=True)
class _Second:
    at: int = -1
    tokens: int = 0
    ended: int = 0
    firsts: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Minute:
    """What a look at `Lately` finds."""

    tokens: tuple[int, ...]
    """By whole second, the oldest first."""
    tokens_per_s: float
    requests_per_s: float
    first_token: Spread
    gap: Spread


@dataclass(slots=True)
class Handed:
    """From one prefill worker to one decode worker, since the router's start."""

    prompts: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Lately:
    """One per router, on its event loop. Calls carry the time, monotonic."""

    pairs: dict[tuple[str, str], Handed] = field(default_factory=dict)
    _ring: list[_Second] = field(default_factory=lambda: [_Second() for _ in range(SECONDS + 1)])

    def first_token(self, now_ns: int, since_ns: int) -> None:
        second = self._second(now_ns)
        second.tokens += 1
        second.firsts[bucket_of(max(now_ns - since_ns, 0))] += 1

    def token(self, now_ns: int, gap_ns: int | None) -> None:
        """`gap_ns`: since the one before it of its choice; None for a choice's first."""
        second = self._second(now_ns)
        second.tokens += 1
        if gap_ns is not None:
            second.gaps[bucket_of(max(gap_ns, 0))] += 1

    def ended(self, now_ns: int) -> None:
        self._second(now_ns).ended += 1

    def handed(self, prefill: str, decode: str, tokens: int) -> None:
        """The KV of so many tokens went from one to the other."""
        pair = self.pairs.setdefault((prefill, decode), Handed())
        if len(self.pairs) > MOST_PAIRS:  # who restarts is somebody else
            del self.pairs[next(iter(self.pairs))]
        pair.prompts += 1
        pair.tokens += tokens

    def look(self, now_ns: int) -> Minute:
        now = now_ns // 10**9
        whole = [self._at(at) for at in range(now - SECONDS, now)]
        seconds = [*whole, self._at(now)]
        firsts: Counter[int] = Counter()
        gaps: Counter[int] = Counter()
        for second in seconds:
            firsts.update(second.firsts)
            gaps.update(second.gaps)
        last = whole[-RATE_S:]
        return Minute(
            tokens=tuple(second.tokens for second in whole),
            tokens_per_s=sum(second.tokens for second in last) / RATE_S,
            requests_per_s=sum(second.ended for second in last) / RATE_S,
            first_token=spread(firsts),
            gap=spread(gaps),
        )

    def _second(self, now_ns: int) -> _Second:
        at = now_ns // 10**9
        slot = at % (SECONDS + 1)
        if self._ring[slot].at != at:
            self._ring[slot] = _Second(at)
        return self._ring[slot]

    def _at(self, at: int) -> _Second:
        second = self._ring[at % (SECONDS + 1)]
        return second if second.at == at else _Second(at)
