"""`kvrelay trace`: the order of a request's spans and where their bars lie."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from kvrelay.services.trace import BAR, MOST_ALIKE, bar, ordered, picture


def span(name: str, start: float, end: float | None, parent: int | None = 0) -> dict[str, Any]:
    return {
        "name": name,
        "part": "router",
        "start_ms": start,
        "end_ms": end,
        "parent": parent,
        "attributes": {},
    }


def test_spans_stand_below_what_they_are_in_and_many_alike_are_one_line() -> None:
    chunks = [span("chunk", n, n + 1, 1) for n in range(MOST_ALIKE + 5)]
    spans = [span("request", 0, 50, None), span("prefill", 0, 20), span("queue", 0, 1), *chunks]
    found = [(deep, one["name"], more) for deep, one, more in ordered(spans)]
    assert found[:3] == [(0, "request", 0), (1, "prefill", 0), (2, "chunk", 0)]
    assert found[-2:] == [(2, "chunk", 5), (1, "queue", 0)]
    assert len(found) == 3 + MOST_ALIKE


def test_a_bar_lies_where_its_time_does() -> None:
    assert bar(0, 100, 100) == "█" * BAR
    assert bar(50, 100, 100) == " " * (BAR // 2) + "█" * (BAR // 2)
    assert bar(100, 100, 100) == " " * (BAR - 1) + "█"
    assert bar(0, 0, 100) == "█"


def test_what_lasts_still_has_no_end() -> None:
    record = {
        "id": "r",
        "outcome": None,
        "route": None,
        "prompt_tokens": 3,
        "output_tokens": 0,
        "duration_ms": 40.0,
        "why": "It waits for workers.",
        "spans": [span("request", 0, None, None), span("[bold]gateway", 0, 1)],
    }
    console = Console(width=120, record=True, file=StringIO())
    console.print(picture(record))
    text = console.export_text()
    assert "r: in flight, 3 tokens in, 0 out" in text and "..." in text and "[bold]gateway" in text
