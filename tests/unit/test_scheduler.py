"""Who computes, who waits and who loses memory: plans, request by request, on small pools."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tests.sim.desk import Desk, desk
from tests.sim.model import BLOCK, VOCAB, reference

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.admission import MAX_PASSED
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import StepResult
from kvrelay.shared.engine.policy import (
    PRIORITY_TOKENS,
    Arrival,
    Policy,
    fcfs,
    priority,
    shortest_uncached_first,
)
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import LegRef, LegSpec, SamplingParams


def spec(leg: str, prompt: int, tokens: int = 2, **more: int) -> LegSpec:
    """A prompt that shares nothing with another leg's."""
    rng = random.Random(leg)
    text = tuple(rng.randrange(VOCAB) for _ in range(prompt))
    return LegSpec(leg, text, SamplingParams(max_tokens=tokens), **more)


def with_policy(policy: Policy, *, seqs: int = 1) -> Desk:
    limits = EngineLimits(BLOCK, seqs, 64, 400, VOCAB, b"desk", policy=policy)
    return Desk(limits, 200)


def order(busy: Desk, specs: list[LegSpec]) -> list[str]:
    """In which these legs start, one at a time, after one that runs now."""
    busy.submit(spec("first", 4, tokens=3))
    busy.step()
    for it in specs:
        busy.submit(it)
    busy.finish()
    return busy.started[1:]


# ---- policies --------------------------------------------------------------------------------


def test_fcfs_starts_legs_in_order_of_arrival() -> None:
    legs = [spec("a", 30, priority=1), spec("b", 4), spec("c", 9)]
    assert order(with_policy(fcfs), legs) == ["a", "b", "c"]


def test_priority_starts_the_more_urgent_first_and_equals_in_order() -> None:
    legs = [spec("a", 4, priority=1), spec("b", 4), spec("c", 4, priority=-3), spec("d", 4)]
    assert order(with_policy(priority), legs) == ["c", "b", "d", "a"]


def test_shortest_uncached_first_counts_what_is_not_cached() -> None:
    busy = with_policy(shortest_uncached_first)
    long = spec("long", 60)
    busy.submit(long)
    busy.finish()
    again = LegSpec("again", long.prompt, long.sampling)
    assert order(busy, [spec("mid", 20), spec("big", 40), again])[1:] == ["again", "mid", "big"]


def test_every_policy_ages_what_waits() -> None:
    late = 10 * PRIORITY_TOKENS
    assert priority(Arrival(0, 1, 5)) < priority(Arrival(late, 1, 0))
    assert priority(Arrival(0, 1, 5)) > priority(Arrival(4 * PRIORITY_TOKENS, 1, 0))
    assert shortest_uncached_first(Arrival(0, 500, 0)) < shortest_uncached_first(Arrival(500, 1, 0))
    assert shortest_uncached_first(Arrival(0, 500, 0)) > shortest_uncached_first(Arrival(498, 1, 0))


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    busy = with_policy(shortest_uncached_first, seqs=4)
    busy.submit(spec("long", 200))
    busy.step()
    busy.submit(spec("short", 8))
    plan = busy.step()
    assert plan is not None
    assert [(row.key, len(row.tokens)) for row in plan.rows] == [("short#0", 8), ("long#0", 56)]


# ---- admission -------------------------------------------------------------------------------


def crowded() -> Desk:
    """Twenty blocks, of which a running leg has ten for a long time."""
    busy = desk(blocks=20, seqs=4)
    busy.submit(spec("running", 30, tokens=40))
    busy.step()
    return busy


def test_a_leg_that_does_not_fit_lets_smaller_ones_pass() -> None:
    busy = crowded()
    busy.submit(spec("big", 48))
    busy.submit(spec("small", 8))
    plan = busy.step()
    assert plan is not None
    assert [row.key for row in plan.rows] == ["running#0", "small#0"]


def test_a_leg_that_does_not_fit_is_passed_a_limited_number_of_times() -> None:
    busy = crowded()
    busy.submit(spec("big", 48))
    for number in range(3 * MAX_PASSED):
        busy.submit(spec(f"small{number}", 4, tokens=1))
    busy.finish()
    assert busy.started.index("big") == 1 + MAX_PASSED
    assert busy.started[2:5] == ["small1", "small2", "small3"]


def test_what_waits_for_a_prefix_on_its_way_lets_others_pass() -> None:
    busy = desk(blocks=60, seqs=8, batched=16)
    text = spec("a", 40).prompt
    busy.submit(LegSpec("a", text, SamplingParams(max_tokens=1)))
    busy.submit(LegSpec("b", (*text, 1), SamplingParams(max_tokens=1)))
    busy.submit(spec("c", 8, tokens=1))
    busy.finish()
    assert busy.started == ["a", "c", "b"]
    assert busy.cached["b"] == 40 and busy.answers["b"] == reference([*text, 1], 1)


def test_a_leg_goes_on_when_the_one_it_waits_for_is_cancelled() -> None:
    busy = desk(blocks=60, seqs=8, batched=16)
    text = spec("a", 40).prompt
    for leg in ("a", "b"):
        busy.submit(LegSpec(leg, text, SamplingParams(max_tokens=1)))
    busy.step()
    busy.engine.handle(m.Cancel(LegRef("a", 0, 0)))
    busy.finish()
    assert busy.cached["b"] == 16 and busy.answers["b"] == reference(text, 1)


def test_a_reservation_waits_for_the_prefix_another_is_receiving() -> None:
    engine = Engine(EngineLimits(BLOCK, 8, 64, 100, VOCAB, b"desk"), 40)
    text = spec("a", 20).prompt
    a, b = LegRef("a", 0, 1), LegRef("b", 0, 2)
    first = engine.handle(m.Reserve("r", a, LegSpec("a", text, SamplingParams()), "P"))
    assert first[1] == m.Room("r", a, 0, (5,))
    follower = LegSpec("b", (*text, 1, 2), SamplingParams())
    assert engine.handle(m.Reserve("r", b, follower, "P")) == []
    engine.handle(m.ChunkArrived(a, 0, 20, last=True, token=5))
    _, out = engine.plan(64)
    assert m.Room("r", b, 20, (1,)) in out


# ---- steps -----------------------------------------------------------------------------------


def test_every_stream_is_in_every_step_and_a_prompt_gets_a_block_at_least() -> None:
    busy = desk(blocks=100, seqs=16, batched=64)
    for number in range(10):
        busy.submit(spec(f"stream{number}", 3, tokens=30))
    busy.step()
    busy.submit(spec("prompt", 40))
    plan = busy.step(budget=8)
    assert plan is not None
    assert [len(row.tokens) for row in plan.rows] == [1] * 10 + [BLOCK]


def test_streams_that_a_step_cannot_hold_take_turns() -> None:
    busy = desk(blocks=100, seqs=16, batched=4)
    for number in range(10):
        busy.submit(spec(f"stream{number}", 2, tokens=12))
    while len(busy.engine.state.running) < 10 or any(
        leg.pending > 1 for leg in busy.engine.state.running
    ):
        busy.step()
    before = {leg.key: leg.outputs for leg in busy.engine.state.running}
    for _ in range(5):
        busy.step()
    gained = [leg.outputs - before[leg.key] for leg in busy.engine.state.running]
    assert gained == [1] * 10


# ---- preemption ------------------------------------------------------------------------------


def preempted(specs: list[LegSpec], blocks: int) -> list[str]:
    """Who lost memory, in order."""
    busy = desk(blocks=blocks)
    victims: list[str] = []
    for it in specs:
        busy.submit(it)
    while busy.step() is not None:
        for leg in busy.engine.state.waiting.values():
            if leg.preemptions > victims.count(leg.spec.leg):
                victims.append(leg.spec.leg)
    for it in specs:
        assert busy.answers[it.leg] == reference(it.prompt, it.sampling.max_tokens)
    return victims


def test_the_newest_leg_of_the_lowest_priority_loses_its_memory() -> None:
    a, b, c = spec("a", 8, 30), spec("b", 8, 30, priority=1), spec("c", 8, 30, priority=1)
    assert preempted([a, b, c], 22)[0] == "c"
    d = spec("d", 8, 30)
    assert preempted([a, b, d], 22)[0] == "b"


def test_nobody_loses_its_memory_twice_before_the_others_did_once() -> None:
    legs = [spec(f"{number}", 8, 60) for number in range(4)]
    victims = preempted(legs, 22)
    assert len(victims) > 4
    assert all(one != other for one, other in pairwise(victims))


def test_a_preempted_leg_finds_its_own_blocks_again() -> None:
    busy = desk(blocks=22)
    for number in range(2):
        busy.submit(spec(f"{number}", 30, 20))
    busy.finish()
    state = busy.engine.state
    assert state.preemptions == 1
    assert busy.computed_tokens < 2 * (30 + 19) + 24


def test_legs_of_more_than_half_the_pool_compute_nothing_twice() -> None:
    busy = desk(blocks=20)
    for number in range(4):
        busy.submit(spec(f"{number}", 48, 8))
    busy.finish()
    assert busy.computed_tokens == 4 * (48 + 7)


@pytest.mark.parametrize("share", [4, 16])
def test_two_hundred_legs_on_a_part_of_their_memory_give_the_same_tokens(share: int) -> None:
    rng = random.Random(share)
    legs = [spec(f"{n}", rng.randint(4, 30), rng.randint(4, 40)) for n in range(200)]
    ample = desk(blocks=4000, seqs=200)
    for it in legs:
        ample.submit(it)
    ample.finish()
    tight = desk(blocks=ample.most_used_blocks // share, seqs=200)
    for it in legs:
        tight.submit(it)
    tight.finish()
    assert tight.answers == ample.answers
    assert sorted(tight.ended) == sorted(ample.ended) and len(tight.ended) == 200
    assert tight.engine.state.preemptions > 0 and ample.engine.state.preemptions == 0
    assert tight.computed_tokens < 1.3 * ample.computed_tokens


# ---- cost ------------------------------------------------------------------------------------


def looked_at(waiting: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many legs a plan asks the cache about while nobody fits."""
    limits = EngineLimits(BLOCK, 16, 64, 64, VOCAB, b"desk")
    engine = Engine(limits, 16)
    for number in range(1 + waiting):
        it = spec(f"{number}", 40, 20)
        engine.handle(m.Serve("r", LegRef(it.leg, 0, number), it, handoff=False))
    plan, _ = engine.plan(64)
    assert plan is not None
    engine.complete(plan, StepResult(plan.step, {row.key: 1 for row in plan.rows}))
    asked = []
    lookup = engine.state.pool.lookup
    monkeypatch.setattr(engine.state.pool, "lookup", lambda h: asked.append(h) or lookup(h))
    engine.plan(64)
    return len(asked)


def test_what_a_plan_looks_at_does_not_grow_with_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looked_at(100, monkeypatch) == looked_at(1000, monkeypatch) > 0
