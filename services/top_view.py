"""The picture that `kvrelay top` draws of a router's answer. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NONE: Final = "-"
POOL: Final = 20
"""Characters of a pool's bar."""
Page = Mapping[str, Any]
_BARS: Final = " ▁▂▃▄▅▆▇█"
_COLOURS: Final = {"ready": "green", "draining": "yellow", "late": "yellow", "not in use": "red"}


def picture(page: Page, problem: str = "") -> RenderableType:
    """Everything, from top to bottom."""
    parts: list[RenderableType] = [_head(page, problem), _totals(page["totals"]), Text()]
    parts.append(_workers(page["workers"]) if page["workers"] else Text("no worker is registered"))
    if page["pairs"]:
        parts += [Text(), _pairs(page["pairs"])]
    parts.append(Text())
    parts.append(_requests(page["requests"]) if page["requests"] else Text("no request yet"))
    return Group(*parts)


def _head(page: Page, problem: str) -> Text:
    state, colour = ("ready", "green") if page["serves"] else ("not ready", "red")
    if page["missing"]:
        state, colour = page["missing"], "yellow" if page["serves"] else "red"
    text = Text.assemble(("kvrelay", "bold"), f"  {page['model']}  ", (state, colour))
    return text.append(f"  {problem}", "red") if problem else text


def _totals(totals: Page) -> Text:
    first, gap = totals["first_token"], totals["gap"]
    lines = [
        f"in flight {totals['in_flight']}, {totals['queued']} wait for their first token   "
        f"{totals['tokens_per_s']:,.1f} tokens/s   {totals['requests_per_s']:.1f} requests/s   ",
        "\nlast minute, p50 / p90 / p99:   ",
        f"first token {_percentiles(first)}   gap {_percentiles(gap)}",
    ]
    most = max(*totals["tokens_by_second"], 1)
    levels = [round(8 * count / most) for count in totals["tokens_by_second"]]
    trace = "".join(_BARS[level] for level in levels[-30:])
    return Text.assemble(lines[0], (trace, "cyan"), *lines[1:])


def _percentiles(found: Page) -> str:
    return " / ".join(duration(found[f"{each}_ms"]) for each in ("p50", "p90", "p99"))


def _table(columns: Sequence[str], numbers: int) -> Table:
    """The last `numbers` columns hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, name in enumerate(columns):
        number = at >= len(columns) - numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _workers(workers: Sequence[Page]) -> Table:
    names = ["worker", "role", "state", "pool", "in use", "cached", "free", "running", "waiting"]
    table = _table([*names, "prefill tok/s", "decode tok/s"], 7)
    for worker in workers:
        blocks = worker["blocks"]
        counts = [blocks[kind] for kind in ("in_use", "cached", "free")]
        table.add_row(
            Text(worker["name"]),
            worker["role"],
            Text(worker["state"], _COLOURS.get(worker["state"], "")),
            _pool(blocks),
            *(f"{count:,}" for count in (*counts, worker["running"], worker["waiting"])),
            _rate(worker["prefill_tokens_per_s"]),
            _rate(worker["decode_tokens_per_s"]),
        )
    return table


def _pool(blocks: Page) -> Text:
    total = max(blocks["total"], 1)
    used = round(POOL * blocks["in_use"] / total)
    cached = min(round(POOL * blocks["cached"] / total), POOL - used)
    rest = POOL - used - cached
    return Text.assemble(("█" * used, "cyan"), ("▒" * cached, "cyan"), ("·" * rest, "dim"))


def _pairs(pairs: Sequence[Page]) -> Table:
    table = _table(["relayed from", "to", "prompts", "tokens", "KV"], 3)
    for pair in pairs:
        counts = f"{pair['prompts']:,}", f"{pair['tokens']:,}"
        table.add_row(Text(pair["prefill"]), Text(pair["decode"]), *counts, _bytes(pair["bytes"]))
    return table


def _requests(requests: Sequence[Page]) -> Table:
    names = ["received", "request", "state", "route", "prompt", "cached", "output", "first token"]
    table = _table([*names, "duration"], 5)
    for request in requests:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(request["received_ms"] / 1e3)),
            Text(request["id"]),
            Text(*_state(request)),
            request["route"] or NONE,
            *(f"{request[f'{kind}_tokens']:,}" for kind in ("prompt", "cached", "output")),
            duration(request["ttft_ms"]),
            duration(request["duration_ms"]),
        )
    return table


def _state(request: Page) -> tuple[str, str]:
    if request["outcome"] is None:
        return ("waiting", "yellow") if request["ttft_ms"] is None else ("writing", "blue")
    if request["outcome"] == "ok":
        return "finished", "green"
    colour = "dim" if request["outcome"] == "cancelled" else "red"
    return str(request["outcome"]).replace("_", " "), colour


def duration(ms: float | None) -> str:
    if ms is None:
        return NONE
    if ms < 1:
        return f"{ms * 1e3:.0f} us"
    if ms < 1000:
        return f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f} ms"
    return f"{ms / 1e3:.2f} s" if ms < 100_000 else f"{ms / 1e3:,.0f} s"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value else NONE


def _bytes(value: float | None) -> str:
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.{0 if unit == 'B' else 1}f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
