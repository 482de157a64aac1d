"""What a person sees: errors in one line, a bar for what takes long, the list of running parts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from kvrelay.services.supervisor import Part
from kvrelay.shared.checkpoint.fetch import Progress as Report


@contextmanager
def byte_progress(console: Console) -> Iterator[Report]:
    """A bar per thing that is done; a line where there is no terminal or no total."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        if what not in tasks:
            if not total_bytes or not console.is_terminal:
                console.print(f"{what} ...", highlight=False)
            elif not bars.live.is_started:
                bars.start()
            tasks[what] = bars.add_task(what, total=total_bytes, visible=bool(total_bytes))
        bars.update(tasks[what], completed=done_bytes)

    try:
        yield report
    finally:
        if bars.live.is_started:  # else it would print an empty line
            bars.stop()


def show_parts(console: Console, parts: Sequence[Part]) -> None:
    """One line per part: role, name, address, process, and what it says about itself."""
    rows = [_cells(part) for part in parts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _cells(part: Part) -> tuple[str, ...]:
    more = [f"{v}" if k == "detail" else f"{k} {v}" for k, v in part.detail.items()]
    address = str(part.detail.get("address", ""))
    shown = ", ".join(m for m in more if not m.startswith("address "))
    return part.spec.role, part.spec.name, address, f"pid {part.pid}", shown


def show_ready(console: Console, url: str, model: str, took_s: float) -> None:
    """Where it answers, and a question to copy."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 32, "temperature": 0})
    console.print(
        f"\nkvrelay serves {model} at {url}/v1 (ready after {took_s:.1f} s)\n", markup=False
    )
    address = shlex.quote(f"{url}/v1/chat/completions")  # brackets mean something to shells
    command = f"curl {address} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {command}\n", markup=False, highlight=False, soft_wrap=True)
    console.print("`kvrelay doctor` and `kvrelay audit` look at it. Ctrl-C stops everything.")
