"""What counts as well: progress, or nothing to do; and what as silence."""

from __future__ import annotations

from kvrelay.shared.worker.health import (
    LOOK_NS,
    SILENT_BEATS,
    STALL_NS,
    WEDGED_NS,
    HealthWatch,
    SilenceWatch,
    WedgeWatch,
)


def test_work_without_progress_is_not_well_after_the_stall_and_well_again_with_the_next_step() -> (
    None
):
    watch = HealthWatch()
    watch.rested(0, turn=1)
    assert watch.well(10, turn=2, progress=5)
    assert watch.well(10 + STALL_NS - 1, turn=2, progress=5)
    assert not watch.well(10 + STALL_NS, turn=2, progress=5)
    assert watch.well(20 + STALL_NS, turn=2, progress=6)


def test_an_engine_nobody_asked_about_while_it_rested_is_well_when_its_first_step_runs() -> None:
    """A resting worker renews without asking: the last look may be hours old."""
    watch = HealthWatch()
    watch.rested(0, turn=1)
    hours = 10**13
    assert watch.well(hours, turn=2, progress=5)
    assert not watch.well(hours + STALL_NS, turn=2, progress=5)


BEAT = 100
"""Two ticks."""


def ticks(watch: SilenceWatch, start: int, end: int) -> int | None:
    """When it is found silent, asked every tick until `end`."""
    times = range(start + watch.tick_ns, end + 1, watch.tick_ns)
    return next((now for now in times if watch.silent(now)), None)


def test_a_router_is_silent_after_some_beats_that_did_not_come() -> None:
    watch = SilenceWatch(BEAT, 0)
    watch.begin(1000)
    for beat in range(1100, 2000, BEAT):
        assert ticks(watch, beat - BEAT, beat) is None
        watch.heard(beat)
    assert ticks(watch, 1900, 10_000) == 1900 + SILENT_BEATS * BEAT


def test_one_whose_loop_stood_for_less_is_not() -> None:
    watch = SilenceWatch(BEAT, 0)
    watch.begin(0)
    stood = (SILENT_BEATS - 1) * BEAT
    assert ticks(watch, 0, stood) is None
    watch.heard(stood)
    assert ticks(watch, stood, 2 * stood) is None


def test_rest_before_its_work_came_is_no_silence() -> None:
    watch = SilenceWatch(BEAT, 0)
    hours = 10**9
    watch.begin(hours)
    assert ticks(watch, hours, hours + (SILENT_BEATS - 1) * BEAT) is None


def test_one_that_stood_still_itself_has_heard_nobody() -> None:
    watch = SilenceWatch(BEAT, 0)
    watch.begin(0)
    assert not watch.silent(50)
    late = 10**9
    assert not watch.silent(late)
    assert not watch.here(late), "there is no word of it, though"
    watch.heard(late)
    assert watch.here(late)
    # Late each time, as on a machine that has too much to do: it listened for a part of that.
    assert [watch.silent(late + n * 1000) for n in range(1, 2 * SILENT_BEATS + 1)] == [
        *[False] * (2 * SILENT_BEATS - 1),
        True,
    ]


def test_one_that_promised_nothing_is_never_silent() -> None:
    watch = SilenceWatch(0, 0)
    watch.begin(0)
    assert watch.tick_ns == 0
    assert not watch.silent(10**12)
    assert watch.here(10**12)


STEP = LOOK_NS // 2


def wedge_after(watch: WedgeWatch, begin_ns: int, step_ns: int) -> int | None:
    """When looks `step_ns` apart find an engine wedged that has work and stands still."""
    for now_ns in range(begin_ns, begin_ns + 3 * WEDGED_NS, step_ns):
        watch.look(now_ns, 2, 5, idle=False)
        if watch.wedged:
            return now_ns - begin_ns
    return None


def test_an_engine_that_stands_still_is_wedged_well_before_the_law_says() -> None:
    watch = WedgeWatch()
    watch.look(0, 1, 5, idle=True)
    found_ns = wedge_after(watch, 10**12, LOOK_NS)
    assert found_ns == WEDGED_NS
    # One look late at the beginning, one at the end, and the law's 2 s are still far.
    assert WEDGED_NS + 2 * LOOK_NS < 1_500_000_000
    watch.look(10**13, 2, 6, idle=False)
    assert not watch.wedged


def test_any_progress_and_any_rest_begin_anew() -> None:
    watch = WedgeWatch()
    for now_ns in range(0, 4 * WEDGED_NS, STEP):
        watch.look(now_ns, 1, now_ns // WEDGED_NS, idle=False)  # a step as long as that
        assert not watch.wedged
    watch.look(5 * WEDGED_NS, 1, 3, idle=True)
    watch.look(5 * WEDGED_NS + STEP, 1, 3, idle=False)
    assert not watch.wedged


def test_a_process_that_stood_still_itself_does_not_blame_its_engine() -> None:
    watch = WedgeWatch()
    watch.look(0, 1, 5, idle=False)
    watch.look(100 * WEDGED_NS, 1, 5, idle=False)
    assert not watch.wedged


def test_an_engine_whose_threads_get_no_processor_is_starved_and_not_wedged() -> None:
    watch = WedgeWatch()
    for now_ns in range(0, 4 * WEDGED_NS, LOOK_NS):
        watch.look(now_ns, 1, 5, idle=False, starved_ns=LOOK_NS if watch.stalls else 0)
        assert not watch.wedged
    assert watch.stalls
