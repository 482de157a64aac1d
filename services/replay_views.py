"""How a replay is shown: lines for people, or an object a line for machines."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.record.entry import counted
from kvrelay.shared.engine.record.lines import Header
from kvrelay.shared.engine.record.replay import CUT_OFF, ReplayFault
from kvrelay.shared.engine.state import EngineState, Leg

NAMED_ROWS = 4
"""So many prompts of a step are named."""


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and what happened since the one before."""

    call: int
    """Number of the call that made it."""
    plan: Plan
    events: Counter[str]
    preemptions: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Result:
    """Of a replay in which all went as recorded."""

    calls: int
    steps: int
    mended: str
    """What the last call raised when it was recorded, and did not now."""
    until: int | None
    """The call that it stopped before, if it did."""
    end: str
    """Why the record ends, if its end was reached."""


class TextView:
    """One line a step; all legs where it stops."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, header: Header) -> None:
        limits = header.limits
        self._say(
            f"{header.worker}, kvrelay {header.software}: {header.blocks} blocks of "
            f"{limits.block_size} tokens, {limits.max_num_seqs} legs, "
            f"{limits.max_num_batched_tokens} tokens a step"
        )

    def step(self, step: Step, state: EngineState) -> None:
        parts = [f"{ran(step.plan)}: {step.plan.tokens} tokens", pool_text(state)]
        parts.append(queues_text(state))
        counts = {
            "copied": len(step.plan.copies),
            "preempted": step.preemptions,
            "evicted": step.evictions,
        }
        parts += [f"{what} {count}" for what, count in counts.items() if count]
        if step.events:
            parts.append(f"after {counted(step.events)}")
        self._say(f"call {step.call} step {step.plan.step}: {' | '.join(parts)}")

    def wait(self) -> None:
        """Let the person look."""
        if self._console.is_terminal:
            self._console.input("[dim]Enter for the next step, Ctrl-C to end[/dim] ")

    def fault(self, fault: ReplayFault, state: EngineState) -> None:
        self._say(str(fault))
        self._legs(state)

    def end(self, result: Result, state: EngineState) -> None:
        if result.until is not None:
            self._say(f"before call {result.until}: {pool_text(state)} | {queues_text(state)}")
            self._legs(state)
        if result.mended:
            self._say(f"call {result.calls} raised {result.mended} when recorded: not any more")
        self._say(f"{result.calls} calls, {result.steps} steps: all as recorded{ending(result)}")

    def _legs(self, state: EngineState) -> None:
        for leg in state.legs.values():
            self._say(f"  {leg_text(leg)}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def ran(plan: Plan) -> str:
    """The streams by their number, prompts by name and range of tokens."""
    prompts = [row for row in plan.rows if len(row.tokens) > 1 or row.index == 0]
    streams = len(plan.rows) - len(prompts)
    texts = [f"{streams} stream{'s' * (streams > 1)}"] if streams else []
    texts += [row_text(row) for row in prompts[:NAMED_ROWS]]
    if len(prompts) > NAMED_ROWS:
        texts.append(f"{len(prompts) - NAMED_ROWS} more prompts")
    return ", ".join(texts)


def row_text(row: PlannedRow) -> str:
    return f"{short(row.key)} [{row.start}, {row.start + len(row.tokens)})"


def short(key: str) -> str:
    """A leg's key with only the beginning of its request's id, which is enough to find it."""
    request, slash, leg = key.partition("/")
    return request[:8] + slash + leg if slash else key


def pool_text(state: EngineState) -> str:
    counts = state.pool.counts()
    text = f"blocks {counts.free} free, {counts.cached_idle} cached, {counts.in_use} used"
    return text + (f", {counts.quarantined} quarantined" if counts.quarantined else "")


def queues_text(state: EngineState) -> str:
    sizes = queue_sizes(state)
    return ", ".join(f"{size} {what}" for what, size in sizes.items() if size or what == "running")


def leg_text(leg: Leg) -> str:
    blocks = " ".join(map(str, leg.blocks)) or "none"
    preempted = f", preempted {leg.preemptions} x" if leg.preemptions else ""
    return f"{short(leg.key)} {leg.phase}: {leg.computed}/{leg.total}{preempted}, blocks {blocks}"


def ending(result: Result) -> str:
    if result.end == CUT_OFF:
        return "; cut off there: the worker was killed, or still writes"
    return f"; the record's end: {result.end}" if result.end else ""


class JsonView:
    """The steps, then the result."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, header: Header) -> None:
        self._say({"worker": header.worker, "software": header.software, "blocks": header.blocks})

    def step(self, step: Step, state: EngineState) -> None:
        self._say(
            {
                "call": step.call,
                "step": step.plan.step,
                "tokens": step.plan.tokens,
                "rows": [[row.key, row.start, len(row.tokens)] for row in step.plan.rows],
                "copied": len(step.plan.copies),
                "preempted": step.preemptions,
                "evicted": step.evictions,
                "events": step.events,
            }
            | state_fields(state)
        )

    def wait(self) -> None:
        """A machine has seen enough."""

    def fault(self, fault: ReplayFault, state: EngineState) -> None:
        self._say({"ok": False, "call": fault.number, "fault": str(fault)} | all_fields(state))

    def end(self, result: Result, state: EngineState) -> None:
        self._say({"ok": True} | asdict(result) | all_fields(state))

    def _say(self, fields: dict[str, Any]) -> None:
        self._console.print(json.dumps(fields), markup=False, highlight=False, soft_wrap=True)


def queue_sizes(state: EngineState) -> dict[str, int]:
    return {
        "running": len(state.running),
        "waiting": len(state.waiting),
        "reserving": len(state.reserving),
        "receiving": state.receiving,
    }


def state_fields(state: EngineState) -> dict[str, Any]:
    return {"pool": asdict(state.pool.counts())} | queue_sizes(state)


def all_fields(state: EngineState) -> dict[str, Any]:
    legs = [
        {
            "key": leg.key,
            "phase": leg.phase,
            "computed": leg.computed,
            "total": leg.total,
            "preemptions": leg.preemptions,
            "blocks": leg.blocks,
        }
        for leg in state.legs.values()
    ]
    return state_fields(state) | {"legs": legs}
