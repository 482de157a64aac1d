"""All orders of events around every moment of two requests' way, with each fault at each place."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.sim.explore import explore, two_legs

from kvrelay.services.router import choreography
from kvrelay.services.router.choreography import Action, LegMachine
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.types import LegRef

DEPTH = int(os.environ.get("KVRELAY_TEST_DEPTH", "3"))
"""Events whose orders are all tried; `make fuzz` asks for more."""
FROM_THE_START = 6
LENGTH = 80
"""Longer than the way of both requests in any one order."""


def around(depth: int, every: int, order: int) -> int:
    """States seen by windows of `depth` events that begin at each `every`-th event."""
    begins = range(0, LENGTH, every)
    return sum(sum(explore(two_legs(), depth, begin=at, order=order)) for at in begins)


def test_all_orders_from_the_start() -> None:
    states = sum(explore(two_legs(), max(DEPTH, FROM_THE_START)))
    print(f"{states} states")
    assert states > 500


@pytest.mark.parametrize("order", [0, -1])
def test_all_orders_around_each_moment(order: int) -> None:
    states = around(DEPTH, 2 * DEPTH, order)
    print(f"{states} states")
    assert states > 500


def keeps_a_reservation(broken: pytest.MonkeyPatch) -> None:
    """The router forgets to tell workers that an attempt is over."""
    broken.setattr(LegMachine, "_release_workers", lambda self: self._told.clear())


def misses_a_loss(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(LegMachine, "worker_lost", lambda self, worker: [])


def trusts_a_hole(broken: pytest.MonkeyPatch) -> None:
    """Decode publishes whatever the last chunk makes whole."""
    handle = Engine.handle

    def blind(self: Engine, event: Any) -> Any:
        leg = self.state.legs.get(event.ref) if hasattr(event, "ref") else None
        if leg is not None and hasattr(event, "last"):
            leg.received = event.start
        return handle(self, event)

    broken.setattr(Engine, "handle", blind)


def ends_twice(broken: pytest.MonkeyPatch) -> None:
    """A cancel that crosses the end of its leg."""

    def cancel(self: LegMachine) -> list[Action]:
        self._finish(None)
        return self._take()

    broken.setattr(LegMachine, "cancel", cancel)


def hears_the_dead(broken: pytest.MonkeyPatch) -> None:
    """What is said of another attempt is taken for this one's."""
    broken.setattr(choreography, "ref_from_wire", lambda ref: Anything(ref.leg, 0, 0))


class Anything(LegRef):
    """Any attempt at the same leg."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LegRef) and self.leg == other.leg

    __hash__ = LegRef.__hash__


@pytest.mark.parametrize(
    "defect", [keeps_a_reservation, misses_a_loss, trusts_a_hole, ends_twice, hears_the_dead]
)
def test_a_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        defect(broken)
        with pytest.raises(AssertionError):
            around(3, 6, 0)
