"""The timeline: stamped once, never backwards, and the durations derived from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.shared.telemetry.timeline import Moment, Timeline


def stamped(*stamps: tuple[Moment, int]) -> Timeline:
    timeline = Timeline()
    for moment, now_ns in stamps:
        assert timeline.stamp(moment, now_ns)
    return timeline


def test_the_first_stamp_of_a_moment_stays() -> None:
    timeline = stamped((Moment.RECEIVED, 10))
    assert not timeline.stamp(Moment.RECEIVED, 20)
    assert timeline.at_ns(Moment.RECEIVED) == 10
    assert timeline.at_ns(Moment.FINISHED) is None


def test_a_stamp_that_came_second_is_not_earlier_than_the_first() -> None:
    timeline = stamped((Moment.PREFILL_ENDED, 30), (Moment.PUBLISHED, 29))
    assert list(timeline) == [(Moment.PREFILL_ENDED, 30), (Moment.PUBLISHED, 30)]
    assert timeline.transfer_exposed_s == 0.0


@given(st.lists(st.tuples(st.sampled_from(Moment), st.integers(0, 2**62))))
def test_time_never_runs_backwards_and_each_moment_is_kept_once(
    stamps: list[tuple[Moment, int]],
) -> None:
    timeline = Timeline()
    kept = [moment for moment, now_ns in stamps if timeline.stamp(moment, now_ns)]
    times = [now_ns for _, now_ns in timeline]
    assert times == sorted(times)
    assert [moment for moment, _ in timeline] == kept == list(dict.fromkeys(m for m, _ in stamps))


def test_durations_of_a_router() -> None:
    timeline = stamped(
        (Moment.RECEIVED, 1_000_000_000),
        (Moment.ASSIGNED, 1_100_000_000),
        (Moment.FIRST_TOKEN, 1_250_000_000),
        (Moment.PUBLISHED, 1_300_000_000),
        (Moment.FINISHED, 3_250_000_000),
    )
    assert timeline.ttft_s == 0.25
    assert timeline.duration_s == 2.25
    assert timeline.tpot_s(5) == 0.5
    assert timeline.tpot_s(2) == 2.0
    assert timeline.tpot_s(1) is None
    assert timeline.tpot_s(0) is None


def test_durations_of_a_prefill_worker() -> None:
    timeline = stamped(
        (Moment.PREFILL_QUEUED, 0),
        (Moment.PREFILL_STARTED, 125_000_000),
        (Moment.PREFILL_ENDED, 625_000_000),
        (Moment.PUBLISHED, 687_500_000),
    )
    assert (timeline.queue_s, timeline.prefill_s) == (0.125, 0.5)
    assert timeline.transfer_exposed_s == 0.0625
    assert timeline.ttft_s is None


def test_there_is_no_duration_against_the_order_of_time() -> None:
    timeline = stamped((Moment.PUBLISHED, 5), (Moment.PREFILL_ENDED, 6))
    assert timeline.transfer_exposed_s is None
