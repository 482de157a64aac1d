"""What this router gave to workers and has not seen end: how long a newcomer would wait there.

A worker's own report knows the work of all routers, but is up to a second old; a router's count of
its own work is exact at any time. So what others gave is what was reported beyond the most that
this router had there lately.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvrelay.services.router.policy import LiveWorker

REPORT_AGE_NS = 1_000_000_000
"""A report is not older: a renewal of the lease brings it, a poll of the store finds it."""
SHARE_PLACEMENTS = 128
"""So many placements back it is looked at who got how much."""


@dataclass(slots=True)
class Peak:
    """A count, and the most that it was within the last `REPORT_AGE_NS` or a little more."""

    now: int = 0
    _most: int = 0
    _before: int = 0
    _since_ns: int = 0

    def add(self, count: int, now_ns: int) -> None:
        self._roll(now_ns)
        self.now += count
        self._most = max(self._most, self.now)

    def most(self, now_ns: int) -> int:
        self._roll(now_ns)
        return max(self._most, self._before)

    def _roll(self, now_ns: int) -> None:
        age_ns = now_ns - self._since_ns
        if age_ns < REPORT_AGE_NS:
            return
        self._before = self._most if age_ns < 2 * REPORT_AGE_NS else self.now
        self._most, self._since_ns = self.now, now_ns


@dataclass(slots=True)
class Queue:
    """What one worker was given."""

    tokens: Peak = field(default_factory=Peak)
    legs: Peak = field(default_factory=Peak)
    given: dict[str, int] = field(default_factory=dict)
    """By leg: how many tokens of its prompt are still to be computed here."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be done at a worker, whoever gave it."""

    tokens: int = 0
    """Of prompts, to be computed before a newcomer's."""
    legs: int = 0
    """That have not ended."""


class Backlog:
    """By incarnation. Calls carry the time, monotonic."""

    def __init__(self) -> None:
        self._queues: dict[str, Queue] = {}
        self._placements: deque[str] = deque(maxlen=SHARE_PLACEMENTS)

    def give(self, worker: str, leg: str, tokens: int, now_ns: int) -> None:
        """`leg` is to be served by `worker`, which computes `tokens` of its prompt."""
        self.ended(worker, leg, now_ns)
        queue = self._queues.setdefault(worker, Queue())
        queue.given[leg] = tokens
        queue.tokens.add(tokens, now_ns)
        queue.legs.add(1, now_ns)
        self._placements.append(worker)

    def computed(self, leg: str, now_ns: int) -> None:
        """The leg's first token has come: its prompt is nobody's work any more."""
        for queue in self._queues.values():
            if tokens := queue.given.get(leg, 0):
                queue.tokens.add(-tokens, now_ns)
                queue.given[leg] = 0

    def ended(self, worker: str, leg: str, now_ns: int) -> None:
        queue = self._queues.get(worker)
        if queue is not None and (tokens := queue.given.pop(leg, None)) is not None:
            queue.tokens.add(-tokens, now_ns)
            queue.legs.add(-1, now_ns)

    def leg_over(self, leg: str, now_ns: int) -> None:
        for worker in self._queues:
            self.ended(worker, leg, now_ns)

    def lost(self, worker: str) -> None:
        self._queues.pop(worker, None)

    def waiting(self, worker: LiveWorker, now_ns: int) -> Waiting:
        queue = self._queues.get(worker.incarnation) or Queue()
        load = worker.load
        others_tokens = max(0, load.waiting_tokens - queue.tokens.most(now_ns))
        others_legs = max(0, load.running_requests - queue.legs.most(now_ns))
        return Waiting(queue.tokens.now + others_tokens, queue.legs.now + others_legs)

    def share(self, worker: LiveWorker) -> int:
        """How many of the last placements it got."""
        return self._placements.count(worker.incarnation)
