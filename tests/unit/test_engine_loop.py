"""The engine's thread: what it survives, and what it does not."""

from __future__ import annotations

import threading

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import EndReason, LegRef, LegSpec, SamplingParams


class OddRunner:
    """Samples 7; raises in steps that hold the token 13."""

    progress = 0

    def run(self, plan: Plan) -> StepResult:
        if any(13 in row.tokens for row in plan.rows):
            raise RuntimeError("unlucky")
        return StepResult(plan.step, {row.key: 7 for row in plan.rows if row.sample})


def make_loop(said: list[m.Instruction], heard: threading.Event) -> EngineLoop:
    limits = EngineLimits(4, 8, 64, 64, 1000, b"test")

    def deliver(out: list[m.Instruction]) -> None:
        said.extend(out)
        if any(isinstance(item, m.Ended) for item in out):
            heard.set()

    return EngineLoop(Engine(limits, 16), OddRunner(), Pace(64, 4), deliver)


def serve(leg: str, *prompt: int) -> m.Serve:
    spec = LegSpec(leg, prompt, SamplingParams(max_tokens=1))
    return m.Serve("r", LegRef(leg, 0, 1), spec, handoff=False)


def test_a_step_that_raises_ends_its_legs_and_the_next_one_runs() -> None:
    said: list[m.Instruction] = []
    heard = threading.Event()
    loop = make_loop(said, heard)
    loop.start()
    try:
        for event in (serve("bad", 13), serve("good", 5)):
            heard.clear()
            loop.post(event)
            assert heard.wait(5.0)
    finally:
        loop.stop()
    ends = {item.ref.leg: item.reason for item in said if isinstance(item, m.Ended)}
    assert ends == {"bad": EndReason.FAILED, "good": EndReason.FINISHED}


def test_a_defect_of_the_engine_itself_is_told() -> None:
    died = threading.Event()
    loop = make_loop([], threading.Event())
    loop.on_death = died.set
    loop.start()
    loop.post("no event at all")  # type: ignore[arg-type]
    assert died.wait(5.0)
    loop.stop()
    assert not loop.alive
