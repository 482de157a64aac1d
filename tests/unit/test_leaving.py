"""Time to free: from a leg's end until its last worker has let go."""

from __future__ import annotations

from kvrelay.services.router import leaving
from kvrelay.services.router.leaving import Leaving
from kvrelay.shared.rpc.convert import ref_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.labels import LegEnd
from kvrelay.shared.types import LegRef

REF = LegRef("r/0", 1, 77)


def cancel(ref: LegRef) -> pb.Command:
    return pb.Command(cancel=ref_to_wire(ref))


class Scene:
    def __init__(self) -> None:
        self.now_s = 10.0
        self.freed: list[tuple[LegEnd, float]] = []
        self.leaving = Leaving(
            lambda how, seconds: self.freed.append((how, round(seconds, 6))),
            lambda: round(self.now_s * 1e9),
        )


def test_the_last_worker_ends_the_wait() -> None:
    scene = Scene()
    scene.leaving.sent("P", cancel(REF))
    scene.leaving.sent("D", cancel(REF))
    scene.leaving.over(REF, LegEnd.CANCELLED)
    scene.now_s += 0.25
    scene.leaving.ended("D", REF)
    assert scene.freed == []
    scene.now_s += 0.5
    scene.leaving.ended("P", REF)
    scene.leaving.ended("P", REF)
    assert scene.freed == [(LegEnd.CANCELLED, 0.75)]
    assert len(scene.leaving) == 0


def test_an_attempt_that_was_replaced_is_counted_apart_from_the_one_that_ended() -> None:
    scene, second = Scene(), LegRef("r/0", 2, 78)
    scene.leaving.sent("P", cancel(REF))
    scene.leaving.sent("P", cancel(second))
    scene.leaving.over(second, LegEnd.FINISHED)
    scene.leaving.ended("P", second)
    scene.leaving.ended("P", REF)
    assert scene.freed == [(LegEnd.FINISHED, 0.0), (LegEnd.REPLACED, 0.0)]


def test_who_is_lost_is_waited_for_no_more() -> None:
    scene, alone = Scene(), LegRef("s/0", 0, 5)
    for worker in ("P", "D"):
        scene.leaving.sent(worker, cancel(REF))
    scene.leaving.sent("P", cancel(alone))
    scene.leaving.over(REF, LegEnd.FAILED)
    scene.leaving.lost("P")
    scene.leaving.ended("P", alone)
    assert scene.freed == []
    scene.leaving.ended("D", REF)
    assert scene.freed == [(LegEnd.FAILED, 0.0)]
    assert len(scene.leaving) == 0


def test_other_commands_and_other_legs_are_nothing_to_wait_for() -> None:
    scene = Scene()
    scene.leaving.sent("P", pb.Command(published=ref_to_wire(REF)))
    scene.leaving.over(REF, LegEnd.FINISHED)
    scene.leaving.ended("P", REF)
    assert scene.freed == [] and len(scene.leaving) == 0


def test_the_table_is_bounded_and_the_oldest_goes_first() -> None:
    scene = Scene()
    refs = [LegRef(f"{number}/0", 0, number) for number in range(leaving.MOST + 1)]
    for ref in refs:
        scene.leaving.sent("P", cancel(ref))
    assert len(scene.leaving) == leaving.MOST
    scene.leaving.ended("P", refs[0])
    scene.leaving.ended("P", refs[1])
    assert len(scene.freed) == 1
