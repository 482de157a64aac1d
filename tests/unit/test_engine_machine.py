"""An engine in a world that does everything in any order: L4 and the right tokens, always."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from tests.sim.engine_world import World

EVENTS = 50_000
SEEDS = st.integers(0, 2**32 - 1)


class EngineMachine(RuleBasedStateMachine):
    """Bursts of events, each from its own seed, so that a failure shrinks to a few short ones."""

    happened: ClassVar[Counter[str]]

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.world = World(random.Random(seed))

    @rule(seed=SEEDS, events=st.integers(1, 60))
    def live(self, seed: int, events: int) -> None:
        self.world.rng.seed(seed)
        for _ in range(events):
            self.world.act()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.happened.update(self.world.happened)
            self.world.settle()


def test_fifty_thousand_events_in_any_order_break_nothing() -> None:
    EngineMachine.happened = Counter()
    some = settings(max_examples=50, stateful_step_count=40, deadline=None)
    while EngineMachine.happened.total() < EVENTS:
        run_state_machine_as_test(EngineMachine, settings=some)
    assert min(EngineMachine.happened.values()) > 100, EngineMachine.happened


def test_a_seed_gives_the_same_life_again() -> None:
    lives = []
    for _ in range(2):
        world = World(random.Random(7))
        for _ in range(500):
            world.act()
        lives.append((world.happened, world.ended, world.engine.state.planned_tokens))
    assert lives[0] == lives[1]
