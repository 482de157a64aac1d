"""The engine's own thread: intake, plan, run, report. Everything else is elsewhere.

Two queues join it to the asyncio side: an inbox of events, and `deliver`, called from this thread
with each batch of instructions.

What a step gave is delivered once the next is planned, right before it runs: whoever takes it then
has the interpreter to itself, as the step needs none of Python. Planning meanwhile on a thread of
its own gains 0.4 ms of a step at batch 8 where a processor is to spare, and loses 0.3 ms where all
compute, as they do unless `threads` says otherwise (2 processors); so it is not done.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Protocol

from kvrelay.shared.engine.messages import Event, Instruction
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, Runner, StepResult
from kvrelay.shared.engine.rows import work_of_rows
from kvrelay.shared.engine.state import EngineState

log = logging.getLogger(__name__)

Deliver = Callable[[list[Instruction]], None]


COMPUTE_NICE = 5
"""Computing yields to what is short and waited for: event loops, streams, leases."""


class Machine(Protocol):
    """An `Engine`, or one that is recorded."""

    @property
    def state(self) -> EngineState: ...
    def handle(self, event: Event) -> list[Instruction]: ...
    def plan(self, budget: int) -> tuple[Plan | None, list[Instruction]]: ...
    def complete(self, plan: Plan, result: StepResult) -> list[Instruction]: ...
    def fail_step(self, plan: Plan, message: str) -> list[Instruction]: ...


class EngineLoop:
    """Runs an engine until `stop`. `post` may be called from any thread."""

    def __init__(self, engine: Machine, runner: Runner, pace: Pace, deliver: Deliver) -> None:
        self.engine = engine
        self.runner = runner
        self.pace = pace
        self._deliver = deliver
        self._inbox: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._stopping = False
        self.shared_duty = 1.0
        """Which part of one processor's time it computes, on its own thread alone, while others
        compute prompts for it on the same processors: streams that go on at that pace leave them to
        who is waited for."""
        self._begun_ns = 0
        self._outputs_only = False
        """Of the last step."""
        self.steps = 0
        self.turns = ctypes.c_int64(0)
        """How often it began to work after having had nothing to do; native code reads it too."""
        self.busy = False
        """A step or an event is being worked on: then `progress` must grow."""
        self.on_step: Callable[[Plan, int], None] = lambda plan, elapsed_ns: None
        self.on_death: Callable[[], None] = lambda: None
        """Called on this thread when a defect ends it: nothing here can be trusted any more."""

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def stop(self) -> None:
        """End after the step that is running. Idempotent."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Nothing is worked on, and nothing waits to be."""
        return self._inbox.empty() and not self.busy

    @property
    def progress(self) -> int:
        return self.steps + self.runner.progress

    def run(self) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICE)
        try:
            self._turn_until_stopped()
        except Exception:  # the thread's outer frame: a worker without an engine must not linger
            log.exception("the engine died")
            self.on_death()

    def _turn_until_stopped(self) -> None:
        out: list[Instruction] = []
        idle = True
        while not self._stopping:
            for event in self.drain(wait=idle):
                out += self.engine.handle(event)
            out = self._give_way(out)
            plan, planned = self.engine.plan(self.pace.budget(self.engine.state.streams))
            self.perform(out + planned)
            idle = plan is None
            out = self.step(plan) if plan is not None else []
        self.perform(out)

    def step(self, plan: Plan) -> list[Instruction]:
        """Compute one plan; a step that raises ends its own legs and no others."""
        outputs_only = self._outputs_only = plan.tokens == len(plan.rows)
        begun_ns = self._begun_ns = time.monotonic_ns()
        worked_ns = time.thread_time_ns()
        try:
            result = self.runner.run(plan, alone=outputs_only and self._gives_way())
        except Exception as error:  # the loop's outer frame: logged, and its legs end
            log.exception("step %d failed", plan.step)
            return self.engine.fail_step(plan, f"the model step failed: {type(error).__name__}")
        elapsed_ns = time.monotonic_ns() - begun_ns
        work_ns = time.thread_time_ns() - worked_ns
        self.steps += 1
        work = work_of_rows(plan.rows, self.engine.state.limits.even_context)
        self.pace.observe(work, elapsed_ns, work_ns, outputs_only=outputs_only)
        self.on_step(plan, elapsed_ns)
        return self.engine.complete(plan, result)

    def _give_way(self, out: list[Instruction]) -> list[Instruction]:
        """Events are worked on meanwhile, and what they and the last step gave is delivered."""
        while (left_s := self._way_s()) > 0:
            self.perform(out)
            out = []
            try:
                event = self._inbox.get(timeout=left_s)
            except Empty:
                break
            if event is not None:
                out = self.engine.handle(event)
        return out

    def _gives_way(self) -> bool:
        """Whether others compute a prompt for it on the same processors, and it has none itself."""
        state = self.engine.state
        return self.shared_duty < 1.0 and state.receiving > 0 and not state.waiting

    def _way_s(self) -> float:
        """How long the next step is still to be put off."""
        if not (self._outputs_only and self._gives_way()) or self._stopping:
            return 0.0
        due_ns = self._begun_ns + self.pace.apart_ns(self.shared_duty)
        return (due_ns - time.monotonic_ns()) / 1e9

    def drain(self, *, wait: bool) -> Iterable[Event]:
        """All events that are here; with `wait`, block for the first."""
        events: list[Event | None] = []
        if wait:
            self.busy = False
            events.append(self._inbox.get())
            self.busy = True  # first: who finds the new turn, and not busy, finds it over
            self.turns.value += 1
        try:
            while True:
                events.append(self._inbox.get_nowait())
        except Empty:
            return [event for event in events if event is not None]

    def perform(self, out: list[Instruction]) -> None:
        if out:
            self._deliver(out)
