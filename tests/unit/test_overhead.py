"""What first tokens took on top: the median of the last, forgotten with time."""

from __future__ import annotations

from kvrelay.services.router.overhead import AGE_NS, UNMEASURED_S, Overheads
from kvrelay.shared.telemetry.labels import RouteKind

SPLIT, LOCAL = RouteKind.SPLIT, RouteKind.LOCAL


def test_it_is_the_median_of_the_last_ones_of_its_kind() -> None:
    overheads = Overheads()
    assert overheads.now(0) == UNMEASURED_S
    for seconds in (9.0, 0.02, 0.03):
        overheads.observe(SPLIT, seconds, 0)
    assert overheads.now(1) == {SPLIT: 0.03, LOCAL: 0.0}
    for _ in range(2):
        overheads.observe(SPLIT, 0.5, 2)
    assert overheads.now(3)[SPLIT] == 0.5


def test_a_first_token_sooner_than_its_prompt_was_expected_has_none() -> None:
    overheads = Overheads()
    overheads.observe(LOCAL, -0.2, 0)
    assert overheads.now(1)[LOCAL] == 0.0


def test_what_is_long_ago_is_tried_again() -> None:
    overheads = Overheads()
    overheads.observe(SPLIT, 0.5, 0)
    overheads.observe(SPLIT, 0.3, AGE_NS)
    assert overheads.now(AGE_NS + 1)[SPLIT] == 0.3
    assert overheads.now(2 * AGE_NS + 1) == UNMEASURED_S
