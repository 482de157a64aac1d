"""`kvrelay trace`: where one request's time went, as bars over all processes, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.services.top import asked
from kvrelay.services.trace_config import TraceConfig
from kvrelay.shared.errors import KvrelayError

BAR: Final = 48
"""Characters of the whole time."""
MOST_ALIKE: Final = 8
"""Spans of one name within one other that are shown; the rest is one line."""
Span = Mapping[str, Any]


def run(config: TraceConfig, console: Console) -> int:
    """The exit code. Raises `KvrelayError` when the router cannot be asked or does not know it."""
    key = config.api_key[0] if config.api_key else ""
    path = f"/dashboard/api/requests/{config.request}"
    missing = f"request: {config.request} is not in flight nor among the last that ended there"
    record = asked(config.router, key, path, missing)
    if not {"spans", "why", "id"} <= record.keys():
        raise KvrelayError(f"router: {config.router} does not answer as a router does")
    if config.as_json:
        console.print(json.dumps(record), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(picture(record))
    return 0


def picture(record: Mapping[str, Any]) -> RenderableType:
    """A line for each span, in the order of time, below the one it is in."""
    spans: Sequence[Span] = record["spans"]
    whole_ms = max([span["end_ms"] or 0.0 for span in spans] + [record["duration_ms"] or 0.0, 1e-6])
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("span")
    table.add_column("begins", justify="right")
    table.add_column("took", justify="right")
    table.add_column("", no_wrap=True)
    for deep, span, more in ordered(spans):
        end_ms = span["end_ms"]
        name = "  " * deep + span["name"] + (f" (and {more} like it)" if more else "")
        table.add_row(
            Text(span["part"]),
            Text(name),
            f"{span['start_ms']:.1f}",
            "..." if end_ms is None else f"{end_ms - span['start_ms']:.1f} ms",
            Text(bar(span["start_ms"], whole_ms if end_ms is None else end_ms, whole_ms)),
        )
    state = record["outcome"] or "in flight"
    route = f", {record['route']}" if record["route"] else ""
    tokens = f"{record['prompt_tokens']} tokens in, {record['output_tokens']} out"
    head = Text(f"{record['id']}: {state}{route}, {tokens}", "bold")
    return Group(head, Text(record["why"]), Text(), table)


def ordered(spans: Sequence[Span]) -> list[tuple[int, Span, int]]:
    """(depth, span, how many like it are left out behind it), each below its parent."""
    within: dict[int | None, list[int]] = {}
    for at, span in enumerate(spans):
        within.setdefault(span["parent"], []).append(at)
    out: list[tuple[int, Span, int]] = []

    def under(parent: int | None, deep: int) -> None:
        seen: dict[str, int] = {}
        for at in sorted(within.get(parent, ()), key=lambda at: spans[at]["start_ms"]):
            name = spans[at]["name"]
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > MOST_ALIKE:
                last = max(n for n, one in enumerate(out) if one[1]["name"] == name)
                out[last] = (*out[last][:2], seen[name] - MOST_ALIKE)
                continue
            out.append((deep, spans[at], 0))
            under(at, deep + 1)

    under(None, 0)
    return out


def bar(start_ms: float, end_ms: float, whole_ms: float) -> str:
    """Where the span lies in the whole; at least one character."""
    first = min(int(start_ms / whole_ms * BAR), BAR - 1)
    last = max(min(round(end_ms / whole_ms * BAR), BAR), first + 1)
    return " " * first + "█" * (last - first)
