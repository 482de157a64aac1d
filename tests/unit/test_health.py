"""What counts as well: progress, or nothing to do."""

from __future__ import annotations

from kvrelay.shared.worker.health import STALL_NS, HealthWatch


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
