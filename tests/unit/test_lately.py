"""The last minute as numbers: percentiles near enough, bounded, and what is older is gone."""

from __future__ import annotations

import random

import pytest

from kvrelay.services.router.lately import MOST_PAIRS, SECONDS, Lately, bucket_of, middle_ns

S = 10**9


def test_a_bucket_is_narrow_and_its_middle_near() -> None:
    rng = random.Random("buckets")
    for _ in range(20_000):
        ns = int(10 ** rng.uniform(0, 12))
        assert abs(middle_ns(bucket_of(ns)) / ns - 1) <= 1 / 32


def test_buckets_are_in_the_order_of_what_is_in_them() -> None:
    found = [bucket_of(ns) for ns in range(5000)]
    assert found == sorted(found)


def test_percentiles_of_gaps_and_first_tokens() -> None:
    lately, now = Lately(), 1000 * S
    gaps = [k * 100_000 for k in range(1, 1001)]
    random.Random("gaps").shuffle(gaps)
    for gap in gaps:
        lately.token(now, gap)
    lately.first_token(now, now - 2 * S)
    found = lately.look(now)
    assert found.gap.count == 1000
    for value, wanted in (
        (found.gap.p50_s, 0.05),
        (found.gap.p90_s, 0.09),
        (found.gap.p99_s, 0.099),
    ):
        assert value == pytest.approx(wanted, rel=0.04)
    assert found.first_token.p50_s == found.first_token.p99_s == pytest.approx(2.0, rel=0.04)


def test_rates_are_of_whole_seconds_and_end() -> None:
    lately = Lately()
    for at in range(100, 120):
        for _ in range(7):
            lately.token(at * S, None)
        lately.ended(at * S)
    now = 120 * S + 1
    found = lately.look(now)
    assert found.tokens_per_s == 7
    assert found.requests_per_s == 1
    assert found.tokens == (0,) * (SECONDS - 20) + (7,) * 20
    assert found.gap.p50_s is None, "no client waited for those"
    assert lately.look(now + 2 * SECONDS * S).tokens == (0,) * SECONDS


def test_a_second_that_comes_round_again_begins_at_nothing() -> None:
    lately = Lately()
    lately.token(5 * S, 1000)
    lately.token((5 + SECONDS + 1) * S, None)
    assert lately.look((5 + SECONDS + 2) * S).tokens == (0,) * (SECONDS - 1) + (1,)
    assert lately.look((5 + SECONDS + 2) * S).gap.count == 0


def test_pairs_of_workers_that_come_and_go_do_not_pile_up() -> None:
    lately = Lately()
    for number in range(3 * MOST_PAIRS):
        lately.handed(f"p{number}", "d", 10)
    lately.handed("p1", "d", 10)
    lately.handed("p1", "d", 5)
    assert len(lately.pairs) == MOST_PAIRS
    assert (lately.pairs["p1", "d"].prompts, lately.pairs["p1", "d"].tokens) == (2, 15)
