"""What comes on top of waiting and computing: messages, turns, the question for room at decode.

It is what first tokens took lately beyond the time of their prompts, by kind of route. On a machine
whose cores are all at work a message takes many times as long as on an idle one, so no constant
would do. What was measured long ago is forgotten: a way that looked slow is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from kvrelay.shared.telemetry.labels import RouteKind

SAMPLES: Final = 3
"""The median of so many: one odd request says nothing, a second one like it does."""
AGE_NS: Final = 20_000_000_000
UNMEASURED_S: Final[Mapping[RouteKind, float]] = {RouteKind.SPLIT: 0.003, RouteKind.LOCAL: 0.0}
"""Two ways through a router on an idle machine, and none."""


class Overheads:
    """Calls carry the time, monotonic."""

    def __init__(self) -> None:
        self._samples: dict[RouteKind, deque[tuple[int, float]]] = {
            kind: deque(maxlen=SAMPLES) for kind in RouteKind
        }

    def observe(self, kind: RouteKind, seconds: float, now_ns: int) -> None:
        self._samples[kind].append((now_ns, max(seconds, 0.0)))

    def now(self, now_ns: int) -> dict[RouteKind, float]:
        """Seconds, of each kind."""
        return {kind: self._of(kind, now_ns) for kind in RouteKind}

    def _of(self, kind: RouteKind, now_ns: int) -> float:
        samples = self._samples[kind]
        while samples and now_ns - samples[0][0] > AGE_NS:
            samples.popleft()
        return median(seconds for _, seconds in samples) if samples else UNMEASURED_S[kind]
