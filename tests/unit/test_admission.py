"""Who is let into the queue, and what the others are told, on a clock of our own."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import pytest

from kvrelay.services.router.admission import LONGEST_RETRY_S, Admission
from kvrelay.shared.errors import Overloaded


@dataclass
class Clock:
    seconds: float = 0.0

    def now_ns(self) -> int:
        return int(self.seconds * 1e9)

    def wall_ns(self) -> int:
        return self.now_ns()


def refused(admission: Admission, legs: int = 1) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.enter(legs)
    return caught.value


def served(admission: Admission, clock: Clock, count: int, every_s: float) -> None:
    """So many come and leave, one at a time."""
    for _ in range(count):
        admission.enter(1)
        clock.seconds += every_s
        admission.leave()


def test_it_is_all_or_nothing() -> None:
    admission = Admission(4, 60.0, Clock())
    admission.enter(3)
    assert "3 choices wait" in str(refused(admission, 2)) and admission.waiting == 3
    admission.enter(1)
    assert "limit of 4" in str(refused(admission))
    admission.leave()
    admission.enter(1)


def test_time_at_rest_says_nothing_about_the_rate() -> None:
    clock = Clock()
    admission = Admission(10, 60.0, clock)
    served(admission, clock, 20, 0.5)
    clock.seconds += 4.0
    admission.enter(10)
    assert refused(admission).retry_after_s == pytest.approx(0.5, rel=0.1)


def test_a_slow_phase_is_forgotten_at_rest() -> None:
    clock = Clock()
    admission = Admission(10, 1.0, clock)
    served(admission, clock, 70, 3.0)
    admission.enter(1)
    assert "limit is 1 s" in str(refused(admission))
    admission.leave()
    clock.seconds += 600.0
    admission.enter(1)
    admission.enter(1)


def test_who_would_wait_longer_than_the_deadline_is_refused_now() -> None:
    clock = Clock()
    admission = Admission(512, 60.0, clock)
    served(admission, clock, 30, 2.0)
    for _ in range(31):
        admission.enter(1)
    error = refused(admission)
    assert "about 62 s, and the limit is 60 s" in str(error)
    assert 1.0 <= error.retry_after_s <= 4.0
    clock.seconds += 4.0
    admission.leave()
    admission.leave()
    admission.enter(1)


def test_those_refused_are_told_to_come_one_after_the_other() -> None:
    clock = Clock()
    admission = Admission(10, 60.0, clock)
    served(admission, clock, 20, 0.1)
    admission.enter(10)
    told = [refused(admission).retry_after_s for _ in range(1000)]
    assert told[:3] == pytest.approx([0.1, 0.2, 0.3], rel=0.2)
    assert told[-1] == LONGEST_RETRY_S
    for _ in range(5):
        clock.seconds += 0.1
        admission.leave()
    admission.enter(5)
    assert refused(admission).retry_after_s == pytest.approx(0.1, rel=0.2)


def test_after_a_burst_the_times_told_come_true() -> None:
    """600 clients at once, room for 50, ten served a second: when each is let in, and was told."""
    rng = random.Random(3)
    clock = Clock()
    admission = Admission(50, 60.0, clock)
    served(admission, clock, 64, 0.1)
    begun_s = clock.seconds
    coming = [(begun_s + rng.random(), number) for number in range(600)]
    heapq.heapify(coming)
    next_s = begun_s
    told_s: dict[int, float] = {}
    ratios: list[float] = []
    while coming:
        at_s, number = heapq.heappop(coming)
        while next_s <= at_s:
            clock.seconds = max(clock.seconds, next_s)
            if admission.waiting:
                admission.leave()
            next_s += rng.expovariate(10.0)
        clock.seconds = at_s
        try:
            admission.enter(1)
        except Overloaded as error:
            wait_s = math.ceil(error.retry_after_s)  # as the header says it
            told_s.setdefault(number, at_s + wait_s)
            heapq.heappush(coming, (at_s + wait_s, number))
            continue
        if number in told_s:
            ratios.append((at_s - begun_s) / (told_s[number] - begun_s))
    assert len(ratios) > 500
    ratios.sort()
    print(f"let in at {ratios[0]:.2f} to {ratios[-1]:.2f} of the time first told")
    good = sum(0.5 <= ratio <= 2.0 for ratio in ratios)
    assert good >= 0.9 * len(ratios)
