"""The engine's thread: what it survives, and what it does not."""

from __future__ import annotations

import hashlib
import threading
import time
from itertools import pairwise

import pytest
from tests.stack import until

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

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        if any(13 in row.tokens for row in plan.rows):
            raise RuntimeError("unlucky")
        return StepResult(plan.step, {row.key: 7 for row in plan.rows if row.sample})


def make_loop(said: list[m.Instruction], heard: threading.Event) -> EngineLoop:
    limits = EngineLimits(4, 8, 64, 64, 1000, b"test")

    def deliver(out: list[m.Instruction]) -> None:
        said.extend(out)
        if any(isinstance(item, m.Ended) for item in out):
            heard.set()

    return EngineLoop(Engine(limits, 16), OddRunner(), Pace(64, 4, 10**9), deliver)


def serve(leg: str, *prompt: int, tokens: int = 1) -> m.Serve:
    spec = LegSpec(leg, prompt, SamplingParams(max_tokens=tokens))
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


def test_what_a_step_gave_is_told_with_the_next_plan_before_that_runs() -> None:
    log: list[str] = []
    ended = threading.Event()

    def deliver(out: list[m.Instruction]) -> None:
        log.append(" ".join(f"{type(item).__name__} {item.ref.leg}" for item in out))
        if log[-1].endswith("Ended long"):
            ended.set()

    limits = EngineLimits(4, 8, 64, 64, 1000, b"test")
    loop = EngineLoop(Engine(limits, 16), OddRunner(), Pace(64, 4, 10**9), deliver)
    loop.on_step = lambda plan, elapsed_ns: log.append(f"step {plan.step}")
    loop.post(serve("long", 5, tokens=3))
    loop.post(serve("short", 6))
    loop.start()
    assert ended.wait(5.0)
    loop.stop()
    assert log == [
        "Started long Started short",
        "step 1",
        "TokenOut long TokenOut short Ended short",
        "step 2",
        "TokenOut long",
        "step 3",
        "TokenOut long Ended long",
    ]


def test_a_stop_leaves_nothing_untold() -> None:
    said: list[m.Instruction] = []
    heard = threading.Event()

    def deliver(out: list[m.Instruction]) -> None:
        said.extend(out)
        heard.set()

    limits = EngineLimits(4, 8, 64, 4000, 1000, b"test")
    loop = EngineLoop(Engine(limits, 1000), OddRunner(), Pace(64, 4, 10**9), deliver)
    loop.post(serve("a", 5, tokens=3900))
    loop.start()
    assert heard.wait(5.0)
    loop.stop()
    tokens = [item.index for item in said if isinstance(item, m.TokenOut)]
    assert tokens == list(range(loop.steps))


WORK = bytes(2 << 20)


class TimedRunner(OddRunner):
    """Steps of some ms of work; notes when each that only decodes begins, and whether alone."""

    def __init__(self) -> None:
        self.begun_s: list[float] = []
        self.alone: list[bool] = []

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        if plan.tokens == len(plan.rows):
            self.begun_s.append(time.monotonic())
            self.alone.append(alone)
        hashlib.sha512(WORK)  # as a step, it leaves the interpreter to others
        return super().run(plan)


@pytest.mark.parametrize("duty", [1.0, 0.1])
def test_a_decode_worker_leaves_its_processors_to_a_prompt_that_it_waits_for(duty: float) -> None:
    """And goes on at once when nothing comes any more, and works on events all the while."""
    ended = threading.Event()
    roomy = threading.Event()

    def deliver(out: list[m.Instruction]) -> None:
        for item in out:
            if isinstance(item, m.Ended) and item.ref.leg == "stream":
                ended.set()
            if isinstance(item, m.Room):
                roomy.set()

    limits = EngineLimits(4, 8, 64, 64, 1000, b"test")
    runner = TimedRunner()
    loop = EngineLoop(Engine(limits, 32), runner, Pace(64, 4, 10**9), deliver)
    loop.shared_duty = duty
    loop.start()
    try:
        loop.post(serve("stream", 5, 6, 7, tokens=40))
        until(lambda: len(runner.begun_s) >= 3, 5.0, "it streams")
        coming = LegSpec("coming", (1, 2, 3, 4, 5), SamplingParams(max_tokens=9))
        loop.post(m.Reserve("r", LegRef("coming", 0, 2), coming, "p"))
        assert roomy.wait(5.0), "the answer waits for no step"
        reserved = len(runner.begun_s)
        until(lambda: len(runner.begun_s) >= reserved + 4, 5.0, "it goes on")
        loop.post(m.Cancel(LegRef("coming", 0, 2)))
        loop.post(m.Forgotten(LegRef("coming", 0, 2)))
        assert ended.wait(5.0)
    finally:
        loop.stop()
    gaps = [b - a for a, b in pairwise(runner.begun_s)]
    assert set(runner.alone[reserved + 1 : reserved + 4]) == {duty < 1.0}
    assert not runner.alone[0] and not runner.alone[-1]
    meanwhile = min(gaps[reserved : reserved + 3])
    assert (meanwhile > 3 * min(gaps)) == (duty < 1.0)
    assert duty == 1.0 or min(gaps[-8:]) < meanwhile / 2
