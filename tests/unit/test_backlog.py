"""How much waits at a worker: a router's own count, and what a late report says of others."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.test_route import site

from kvrelay.services.router.backlog import REPORT_AGE_NS, Backlog, Waiting
from kvrelay.services.router.policy import LiveWorker

LATER = 3 * REPORT_AGE_NS


def reporting(tokens: int = 0, running: int = 0) -> LiveWorker:
    worker = site("p").worker
    load = replace(worker.load, waiting_tokens=tokens, running_requests=running)
    return replace(worker, load=load)


def test_what_was_given_counts_until_it_is_computed_and_ended() -> None:
    backlog = Backlog()
    backlog.give("p", "a", 100, 0)
    backlog.give("p", "b", 20, 0)
    assert backlog.waiting(reporting(), 1) == Waiting(120, 2)
    backlog.computed("a", 2)
    backlog.computed("a", 3)
    assert backlog.waiting(reporting(), 4) == Waiting(20, 2)
    backlog.ended("p", "a", 5)
    backlog.leg_over("b", 6)
    backlog.leg_over("b", 7)
    assert backlog.waiting(reporting(), LATER) == Waiting(0, 0)


def test_a_leg_given_twice_counts_once() -> None:
    backlog = Backlog()
    backlog.give("p", "a", 100, 0)
    backlog.give("p", "a", 60, 1)
    assert backlog.waiting(reporting(), 2) == Waiting(60, 1)


def test_a_late_report_of_own_work_is_not_anothers() -> None:
    backlog = Backlog()
    backlog.give("p", "a", 100, 0)
    backlog.leg_over("a", 1)
    late = reporting(tokens=100, running=1)
    assert backlog.waiting(late, 2) == Waiting(0, 0)
    assert backlog.waiting(late, LATER) == Waiting(100, 1), "by then it would be news"


def test_the_work_of_other_routers_is_added() -> None:
    backlog = Backlog()
    assert backlog.waiting(reporting(tokens=300, running=2), 0) == Waiting(300, 2)
    backlog.give("p", "a", 100, 0)
    assert backlog.waiting(reporting(tokens=300, running=2), 1) == Waiting(300, 2)


def test_a_lost_worker_starts_anew() -> None:
    backlog = Backlog()
    backlog.give("p", "a", 100, 0)
    backlog.lost("p")
    backlog.computed("a", 1)
    assert backlog.waiting(reporting(), 2) == Waiting(0, 0)


def test_the_share_is_of_the_last_placements() -> None:
    backlog = Backlog()
    for number in range(200):
        backlog.give("p" if number < 150 else "q", str(number), 1, 0)
    assert backlog.share(reporting()) == 78
