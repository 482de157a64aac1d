"""An engine that tells what it is asked and what it answers; it answers the same as without."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.shared.engine.engine import Engine, Out
from kvrelay.shared.engine.messages import Event
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.record.entry import (
    Asked,
    Complete,
    Entry,
    FailStep,
    Handle,
    MakePlan,
    Planned,
)
from kvrelay.shared.engine.state import EngineState

Note = Callable[[Entry], None]


class RecordedEngine:
    """In the place of an `Engine`. `note` is called after each call, on the caller's thread."""

    def __init__(self, engine: Engine, note: Note) -> None:
        self._engine = engine
        self._note = note

    @property
    def state(self) -> EngineState:
        return self._engine.state

    def handle(self, event: Event) -> Out:
        return self._noted(Handle(event), lambda: self._engine.handle(event))

    def complete(self, plan: Plan, result: StepResult) -> Out:
        asked = Complete.of(plan, result)
        return self._noted(asked, lambda: self._engine.complete(plan, result))

    def fail_step(self, plan: Plan, message: str) -> Out:
        return self._noted(FailStep(message), lambda: self._engine.fail_step(plan, message))

    def plan(self, budget: int) -> tuple[Plan | None, Out]:
        asked = MakePlan(budget)
        try:
            plan, out = self._engine.plan(budget)
        except Exception as error:
            self._note(Entry(asked, raised=named(error)))
            raise
        self._note(Entry(asked, Planned.of(plan) if plan is not None else None, tuple(out)))
        return plan, out

    def _noted(self, asked: Asked, act: Callable[[], Out]) -> Out:
        """A call that a defect ends is noted, too: it is the one that is wanted most."""
        try:
            out = act()
        except Exception as error:
            self._note(Entry(asked, raised=named(error)))
            raise
        self._note(Entry(asked, out=tuple(out)))  # the list goes on growing in the loop
        return out


def named(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
