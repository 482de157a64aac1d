"""`kvrelay replay`: a recorded engine's life, step by step. How it looks is in `replay_views`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvrelay.services.replay_views import JsonView, Result, Step, TextView
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.record.entry import Complete, FailStep, Handle
from kvrelay.shared.engine.record.lines import Line
from kvrelay.shared.engine.record.replay import RecordFile, Replay, ReplayFault
from kvrelay.shared.engine.state import EngineState

BAR_AFTER_S = 2.0
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    until: int | None = None
    """Stop before this call."""
    step: bool = False
    """Wait for Enter after each step."""
    verify: bool = False
    """Say nothing of the steps."""
    as_json: bool = False
    checks: bool = True
    """Look at the whole pool after each call, and not only after the last."""


def run(path: Path, options: ReplayOptions, console: Console) -> int:
    """0 when all went as recorded, 1 when it did not. Raises `ConfigError` for a bad file."""
    record = RecordFile(path)
    view = JsonView(console) if options.as_json else TextView(console)
    player = _Player(record, options, view)
    view.begin(record.header)
    try:
        with bar(record, shown=console.is_terminal and not options.verify) as tick:
            player.play(tick)
    except ReplayFault as fault:
        view.fault(fault, player.state)
        return 1
    view.end(player.result(), player.state)
    return 0


class _Player:
    def __init__(
        self, record: RecordFile, options: ReplayOptions, view: TextView | JsonView
    ) -> None:
        self._record = record
        self._options = options
        self._view = view
        self._replay = Replay(record.header, checks=options.checks)
        self._calls = self._steps = 0
        self._mended = ""
        self._stopped = False
        self._events: Counter[str] = Counter()
        self._counted = (0, 0)

    @property
    def state(self) -> EngineState:
        return self._replay.engine.state

    def result(self) -> Result:
        return Result(
            calls=self._calls,
            steps=self._steps,
            mended=self._mended,
            until=self._options.until if self._stopped else None,
            end=self._record.end,
        )

    def play(self, tick: Tick) -> None:
        for line in self._record.lines():
            if line.number == self._options.until:
                self._stopped = True
                break
            self._turn(line)
            tick()
        self._replay.check(self._calls)

    def _turn(self, line: Line) -> None:
        turn = self._replay.turn(line)
        self._calls, self._mended = line.number, turn.mended
        if isinstance(line.asked, Handle):
            self._events[type(line.asked.event).__name__] += 1
        elif isinstance(line.asked, FailStep):
            self._events["step failed"] += 1
        elif isinstance(line.asked, Complete):
            failed = sum(isinstance(drawn, str) for drawn in line.asked.drawn)
            self._events.update({"row failed": failed} if failed else {})
        if turn.plan is not None:
            self._stepped(turn.plan)

    def _stepped(self, plan: Plan) -> None:
        state = self.state
        now = (state.preemptions, state.pool.evictions)
        preempted, evicted = (a - b for a, b in zip(now, self._counted, strict=True))
        step = Step(self._calls, plan, self._events, preempted, evicted)
        self._events, self._counted = Counter(), now
        self._steps += 1
        if not self._options.verify:
            self._view.step(step, state)
            if self._options.step:
                self._view.wait()


@contextmanager
def bar(record: RecordFile, *, shown: bool) -> Iterator[Tick]:
    """A bar on stderr for what takes longer, unless the steps are `shown` on a terminal."""
    errors = Console(stderr=True)
    progress = Progress(console=errors, transient=True)
    task = progress.add_task("replaying", total=record.bytes_total)
    begun_s = time.monotonic()

    def tick() -> None:
        if not progress.live.is_started:
            if time.monotonic() - begun_s < BAR_AFTER_S:
                return
            progress.start()
        progress.update(task, completed=record.bytes_read)

    try:
        yield tick if errors.is_terminal and not shown else lambda: None
    finally:
        if progress.live.is_started:
            progress.stop()
