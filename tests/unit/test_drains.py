"""When a router moves what a draining worker runs, on virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.virtual import VirtualClock, run_virtual
from tests.unit.test_readiness import DECODE, PREFILL

from kvrelay.services.router.choreography import LegMachine, Stage
from kvrelay.services.router.drains import RETRY_S, SPREAD, STAY, Drains
from kvrelay.services.router.running import RunningLeg, RunningRequest
from kvrelay.shared.types import LegSpec, SamplingParams
from kvrelay.shared.worker.drain import Drain


class Legs:
    """A `Mover` that notes who was moved when; nobody can go on before `free_s`."""

    def __init__(self, stages: list[Stage], free_s: float = 0.0) -> None:
        self.free_s = free_s
        self.there: list[RunningLeg] = []
        self.moved_s: list[float] = []
        for number, stage in enumerate(stages):
            machine = LegMachine(LegSpec(f"r/{number}", (1,), SamplingParams()), 0, lambda: 1)
            machine.stage = stage
            self.there.append(RunningLeg(machine))

    def needing(self, worker: str) -> list[tuple[RunningRequest, RunningLeg]]:
        return [(None, leg) for leg in self.there]  # type: ignore[misc]

    def leave(self, running: RunningRequest, leg: RunningLeg, worker: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s < self.free_s:
            return False
        if leg in self.there:
            self.there.remove(leg)
            self.moved_s.append(now_s)
        return True


def drained(legs: Legs, seconds: float) -> Legs:
    async def scene() -> None:
        drains = Drains(legs)
        drains.begin("decode", seconds)
        drains.begin("decode", seconds)
        assert drains.staying([PREFILL, DECODE]) == [PREFILL]
        await asyncio.sleep(2 * seconds)
        drains.over("decode")
        assert drains.staying([PREFILL, DECODE]) == [PREFILL, DECODE]

    run_virtual(scene)
    return legs


def test_what_waits_moves_at_once_and_what_runs_one_after_the_other() -> None:
    legs = drained(Legs([Stage.DECODING, Stage.QUEUED, *[Stage.DECODING] * 3]), 40.0)
    first, *rest = legs.moved_s
    assert first == 0.0
    assert rest == [40.0 * STAY + 40.0 * SPREAD * at / 4 for at in range(4)]


def test_an_earlier_end_counts_and_the_same_again_does_not() -> None:
    async def scene() -> None:
        legs = Legs([Stage.DECODING])
        drains = Drains(legs)
        drains.begin("decode", 60.0)
        await asyncio.sleep(1.0)
        drains.begin("decode", 59.0)
        drains.begin("decode", 4.0)
        await asyncio.sleep(100.0)
        assert legs.moved_s == [1.0 + 4.0 * STAY]

    run_virtual(scene)


def test_a_leg_that_ended_by_itself_is_not_moved() -> None:
    async def scene() -> None:
        legs = Legs([Stage.DECODING])
        Drains(legs).begin("decode", 10.0)
        await asyncio.sleep(1.0)
        legs.there.clear()
        await asyncio.sleep(20.0)
        assert legs.moved_s == []

    run_virtual(scene)


def test_without_anybody_to_go_on_it_is_tried_again_until_there_is() -> None:
    legs = drained(Legs([Stage.DECODING], free_s=9.0), 10.0)
    assert 9.0 <= legs.moved_s[0] < 9.0 + RETRY_S


def test_a_drain_ends_with_its_legs_its_time_or_in_a_hurry() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        drain = Drain(VirtualClock(loop), 10.0)
        assert drain.remaining_ms is None
        assert drain.begin() and not drain.begin(20.0) and drain.remaining_ms == 10_000
        assert drain.begin(5.0) and drain.remaining_ms == 5_000, "the earlier end counts"
        gone_s = loop.time() + 1.0
        assert await drain.wait(lambda: int(loop.time() < gone_s)) == 0
        assert loop.time() == pytest.approx(1.0, abs=0.1)
        assert await drain.wait(lambda: 3) == 3
        assert loop.time() == pytest.approx(5.0, abs=0.1)
        hasty = Drain(VirtualClock(loop), 10.0)
        hasty.begin()
        loop.call_later(1.0, hasty.hurry)
        assert await hasty.wait(lambda: 3) == 3
        assert loop.time() == pytest.approx(6.0, abs=0.2)

    run_virtual(scene)
