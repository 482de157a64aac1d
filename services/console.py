"""What a person sees: errors in one line, a bar for what takes long, the list of running parts."""

from __future__ import annotations

import json
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
from rich.table import Table

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
        bars.stop()


def show_parts(console: Console, parts: Sequence[Part]) -> None:
    """One line per part: role, name, address, process, and what it says about itself."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for part in parts:
        more = [f"{v}" if k == "detail" else f"{k} {v}" for k, v in part.detail.items()]
        table.add_row(
            part.spec.role,
            part.spec.name,
            str(part.detail.get("address", "")),
            f"pid {part.pid}",
            ", ".join(m for m in more if not m.startswith("address ")),
        )
    console.print(table, highlight=False)


def show_ready(console: Console, url: str, model: str, took_s: float) -> None:
    """Where it answers, and a question to copy."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 32, "temperature": 0})
    console.print(
        f"\nkvrelay serves {model} at {url}/v1 (ready after {took_s:.1f} s)\n", markup=False
    )
    command = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {command}\n", markup=False, highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops everything.")
