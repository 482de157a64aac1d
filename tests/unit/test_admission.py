"""Who is let into the queue, and what the others are told, on a clock of our own."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import mean

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


STRANGERS = itertools.count()


def refused(admission: Admission, legs: int = 1, who: Hashable | None = None) -> Overloaded:
    """Unless said, it is somebody who never came before."""
    with pytest.raises(Overloaded) as caught:
        admission.enter(legs, next(STRANGERS) if who is None else who)
    return caught.value


def served(admission: Admission, clock: Clock, count: int, every_s: float) -> None:
    """So many come and leave, one at a time."""
    for _ in range(count):
        admission.enter(1, "")
        clock.seconds += every_s
        admission.leave()


def test_it_is_all_or_nothing() -> None:
    admission = Admission(4, 60.0, Clock())
    admission.enter(3, "")
    assert "3 choices wait" in str(refused(admission, 2)) and admission.waiting == 3
    admission.enter(1, "")
    assert "limit of 4" in str(refused(admission))
    admission.leave()
    admission.enter(1, "")


def test_time_at_rest_says_nothing_about_the_rate() -> None:
    clock = Clock()
    admission = Admission(10, 60.0, clock)
    served(admission, clock, 20, 0.5)
    clock.seconds += 4.0
    admission.enter(10, "")
    assert refused(admission).retry_after_s == pytest.approx(0.5, rel=0.1)


def test_a_slow_phase_is_forgotten_at_rest() -> None:
    clock = Clock()
    admission = Admission(10, 1.0, clock)
    served(admission, clock, 70, 3.0)
    admission.enter(1, "")
    assert "limit is 1 s" in str(refused(admission))
    admission.leave()
    clock.seconds += 600.0
    admission.enter(1, "")
    admission.enter(1, "")


def test_who_would_wait_longer_than_the_deadline_is_refused_now() -> None:
    clock = Clock()
    admission = Admission(512, 60.0, clock)
    served(admission, clock, 30, 2.0)
    for _ in range(31):
        admission.enter(1, "")
    error = refused(admission)
    assert "about 62 s, and the limit is 60 s" in str(error)
    assert 1.0 <= error.retry_after_s <= 4.0
    clock.seconds += 4.0
    admission.leave()
    admission.leave()
    admission.enter(1, "")


def test_those_refused_are_told_to_come_one_after_the_other() -> None:
    clock = Clock()
    admission = Admission(10, 60.0, clock)
    served(admission, clock, 20, 0.1)
    admission.enter(10, "")
    told = [refused(admission).retry_after_s for _ in range(7000)]
    assert told[:3] == pytest.approx([0.1, 0.2, 0.3], rel=0.2)
    assert told[-1] == LONGEST_RETRY_S
    for _ in range(8):
        clock.seconds += 0.1
        admission.leave()
    admission.enter(8, "")
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
            admission.enter(1, number)
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


class Overloading:
    """Room for 50, ten served a second, ten times as many newcomers."""

    def __init__(self, come_back: float, seconds: int = 58) -> None:
        self._rng = random.Random(7)
        self._come_back = come_back
        self._clock = Clock()
        self._admission = Admission(50, 60.0, self._clock)
        served(self._admission, self._clock, 64, 0.1)
        begun_s = self._departs_s = self._clock.seconds
        self._end_s = begun_s + seconds
        self._coming = [(begun_s + number / 100, number) for number in range(seconds * 100)]
        self._told: dict[int, tuple[float, float]] = {}
        """By client: when it first came, and how long it was told to wait."""
        self.ratios: list[float] = []
        """Of those who came back and were served: how long it took to what they were first told."""
        self.in_vain = self.served = 0
        """Came back and were not served in twice the time they were told; all who were served."""
        self.queues: list[int] = []
        while self._coming:
            self._come(*heapq.heappop(self._coming))

    def _come(self, at_s: float, number: int) -> None:
        self._serve_until(at_s)
        first_s, told_s = self._told.get(number, (at_s, 0.0))
        try:
            self._admission.enter(1, f"request {number}")
        except Overloaded as error:
            again_s = at_s + error.retry_after_s + self._rng.random()  # of the network, and chance
            if told_s and again_s > first_s + 2 * told_s:
                self.in_vain += 1
            elif (told_s or self._rng.random() < self._come_back) and again_s < self._end_s:
                heapq.heappush(self._coming, (again_s, number))
            self._told.setdefault(number, (at_s, max(error.retry_after_s, 1.0)))
        else:
            if told_s:
                self.ratios.append((at_s - first_s) / told_s)

    def _serve_until(self, at_s: float) -> None:
        while self._departs_s <= at_s:
            self._clock.seconds = self._departs_s
            self.queues.append(self._admission.waiting)
            if self._admission.waiting:
                self._admission.leave()
                self.served += 1
            self._departs_s += self._rng.expovariate(10.0)
        self._clock.seconds = at_s


def test_who_comes_when_told_to_is_served_though_nine_in_ten_are_newcomers() -> None:
    seen = Overloading(come_back=1.0)
    assert len(seen.ratios) > 400 and seen.served > 500
    good = sum(0.5 <= ratio <= 2.0 for ratio in seen.ratios)
    assert good >= 0.95 * (len(seen.ratios) + seen.in_vain)


def test_places_kept_for_those_who_never_come_are_no_more_than_half() -> None:
    seen = Overloading(come_back=0.0)
    assert seen.ratios == [] and seen.served > 500
    assert 20 <= mean(seen.queues) <= 50


def test_who_comes_after_a_minute_because_no_library_waits_longer_keeps_its_turn() -> None:
    clock = Clock()
    admission = Admission(10, 600.0, clock)
    served(admission, clock, 20, 0.5)
    admission.enter(10, "")
    for _ in range(200):
        refused(admission)
    told_s = refused(admission, who="patient").retry_after_s
    assert told_s == pytest.approx(125, rel=0.1), "a fifth of the places is for newcomers"
    clock.seconds += 60.0
    again_s = refused(admission, who="patient").retry_after_s
    assert again_s == pytest.approx(told_s - 60.0, abs=1.5)
    clock.seconds += again_s
    admission.leave()
    refused(admission)
    admission.enter(1, "patient")


def test_who_was_told_to_come_and_finds_no_room_is_not_put_at_the_end() -> None:
    clock = Clock()
    admission = Admission(10, 60.0, clock)
    served(admission, clock, 20, 0.1)
    admission.enter(10, "")
    told_s = refused(admission, who="first").retry_after_s
    for _ in range(200):
        refused(admission)
    clock.seconds += told_s
    assert refused(admission, who="first").retry_after_s < 1.0 < refused(admission).retry_after_s
    admission.leave()
    assert "kept for those who were told" in str(refused(admission))
    admission.enter(1, "first")


def newcomer_after_an_overload(seed: int) -> int:
    """Room for 64, ten times what is served, refused clients that come back, also when it is over:
    how many departures somebody new, who asks every 0.1 s from then on, waits to be let in."""
    rng, clock = random.Random(seed), Clock()
    admission = Admission(64, 60.0, clock)
    served(admission, clock, 64, 1 / 40)
    end_s = clock.seconds + 20
    coming = [(clock.seconds + number / 400, number) for number in range(20 * 400)]
    heapq.heappush(coming, (end_s, -1))
    departs_s, departed = clock.seconds, 0
    told: dict[int, tuple[float, float]] = {}
    while True:
        at_s, number = heapq.heappop(coming)
        while departs_s <= at_s:
            clock.seconds = departs_s
            if admission.waiting:
                admission.leave()
                departed += departs_s > end_s
            departs_s += rng.expovariate(40.0)
        clock.seconds = at_s
        try:
            admission.enter(1, f"request {number}")
        except Overloaded as error:
            if number < 0:
                heapq.heappush(coming, (at_s + 0.1, number - 1))
                continue
            wait_s = math.ceil(error.retry_after_s)
            first_s, first_told_s = told.setdefault(number, (at_s, wait_s))
            if at_s <= first_s + 2 * first_told_s:
                heapq.heappush(coming, (at_s + wait_s, number))
        else:
            if number < 0:
                return departed


def test_who_comes_when_the_load_is_over_is_let_in_after_few_departures() -> None:
    waits = [newcomer_after_an_overload(seed) for seed in range(16)]
    assert max(waits) <= 20, waits


def test_one_newcomer_in_ten_departures_is_let_in_where_places_are_kept() -> None:
    clock = Clock()
    admission = Admission(20, 60.0, clock)
    served(admission, clock, 20, 0.1)
    admission.enter(20, "")
    for number in range(100):
        refused(admission, who=number)
    let_in = 0
    for _ in range(40):
        clock.seconds += 0.1
        admission.leave()
        try:
            admission.enter(1, next(STRANGERS))
        except Overloaded:
            admission.waiting += 1  # one of those who are due, and come
        else:
            let_in += 1
    assert 3 <= let_in <= 4
