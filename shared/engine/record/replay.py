"""Lives a recorded engine's life again, without a model, and compares it call by call.

In a test, a record from the field is one line:

    replay(Path("tests/data/fault.jsonl"))

It raises `ReplayFault` at the first call that goes another way than recorded, raises, or leaves the
pool in a state that breaks its law. With `until` it stops before that call, and the test looks at
what the engine does next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.shared.engine.engine import Engine, Out
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.record.entry import (
    Asked,
    Complete,
    Entry,
    FailStep,
    Handle,
    MakePlan,
    Planned,
    outcome_of,
)
from kvrelay.shared.engine.record.lines import End, Header, Line, read_header, read_line
from kvrelay.shared.engine.record.recorded import named
from kvrelay.shared.errors import ConfigError, KvrelayError

CUT_OFF: Final = "cut off"


class ReplayFault(KvrelayError):
    """What a replay found, with the number of the call."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"call {number}: {what}")
        self.number = number


class RecordFile:
    """A record that is read line by line. Raises `ConfigError` when it cannot be understood."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.end = ""
        """Why it ends, once that was read."""
        try:
            self.bytes_total = path.stat().st_size
            with path.open("rb") as file, self._line(1):
                self.header = read_header(file.readline())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    def lines(self) -> Iterator[Line]:
        """The calls up to the end or to where the record was cut off, even within a line."""
        with self.path.open("rb") as file:
            self.bytes_read = len(file.readline())
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                self.bytes_read += len(text)
                with self._line(number + 1):
                    line = read_line(number, text)
                if isinstance(line, End):
                    self.end = line.why
                    return
                yield line
            self.end = CUT_OFF

    @contextmanager
    def _line(self, number: int) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.path} line {number}: {error}") from error


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that was made again and went as recorded."""

    number: int
    asked: Asked
    plan: Plan | None
    """What `plan` gave."""
    out: Out
    mended: str = ""
    """What it raised when it was recorded, and does not raise now."""


class Replay:
    """An engine, and the step that it planned last."""

    def __init__(self, header: Header, *, checks: bool = True) -> None:
        """With `checks` all blocks are looked at after each call, which takes most of the time."""
        self.engine = Engine(header.limits, header.blocks)
        self._checks = checks
        self._plan: Plan | None = None

    def turn(self, line: Line) -> Turn:
        """Make one call. Raises `ReplayFault`; then this engine's life is over."""
        number = line.number
        try:
            plan, out = self._call(line)
        except ReplayFault:
            raise
        except Exception as error:  # the engine's defects are what a replay is for
            again = ", as it did when recorded" if named(error) == line.outcome.raised else ""
            raise ReplayFault(number, f"raises {named(error)}{again}") from error
        now = outcome_of(Entry(line.asked, None if plan is None else Planned.of(plan), out))
        mended = line.outcome.raised
        if not mended and (what := line.outcome.difference(now)) is not None:
            raise ReplayFault(number, what)
        if self._checks:
            self.check(number)
        return Turn(number, line.asked, plan, out, mended)

    def check(self, number: int) -> None:
        """Raise `ReplayFault` if what call `number` left breaks the pool's law."""
        try:
            self.engine.state.check()
        except AssertionError as error:
            raise ReplayFault(number, f"leaves a pool that breaks its law: {error}") from error

    def _call(self, line: Line) -> tuple[Plan | None, Out]:
        match line.asked:
            case Handle(event):
                return None, self.engine.handle(event)
            case MakePlan(budget):
                self._plan, out = self.engine.plan(budget)
                return self._plan, out
            case Complete() as complete:
                plan = self._taken(line.number)
                if len(plan.rows) != len(complete.drawn):
                    what = f"{len(complete.drawn)} results for a plan of {len(plan.rows)} rows"
                    raise ReplayFault(line.number, what)
                return None, self.engine.complete(plan, complete.result(plan))
            case FailStep(message):
                return None, self.engine.fail_step(self._taken(line.number), message)

    def _taken(self, number: int) -> Plan:
        plan, self._plan = self._plan, None
        if plan is None:
            raise ReplayFault(number, "ends a step, and none was planned")
        return plan


def replay(path: Path, until: int | None = None) -> Replay:
    """Make every call of a record before number `until`, or all of them."""
    record = RecordFile(path)
    replay = Replay(record.header)
    for line in record.lines():
        if line.number == until:
            break
        replay.turn(line)
    return replay
