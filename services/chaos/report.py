"""What a run found: a table for people, an object for machines, and whether it may be so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvrelay.services.chaos.load import Tally
from kvrelay.services.chaos.watch import Rest, Size

GROWTH_BYTES = 64 << 20
GROWTH_COUNT = 16
"""Of descriptors or threads."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was seen."""

    requests: int
    took_s: float
    tally: Tally
    rest: Rest
    actions: Mapping[str, int]
    noticed_s: Mapping[str, Sequence[float]]
    faults: Mapping[str, int]
    before: Mapping[str, Size]
    after: Mapping[str, Size]
    least_full: float
    retries: bool
    """Whether the plan may make any."""
    log_folder: str

    def growth(self) -> dict[str, tuple[int, int, int]]:
        """By part that lived through it all: (bytes, descriptors, threads)."""
        return {
            name: (
                now.rss_bytes - then.rss_bytes,
                now.descriptors - then.descriptors,
                now.threads - then.threads,
            )
            for name, now in self.after.items()
            if (then := self.before.get(name)) is not None and then.pid == now.pid
        }

    def complaints(self) -> list[str]:
        """Why it may not be so; empty when all that must hold held."""
        tally, rest = self.tally, self.rest
        found = [f"wrong token: {line}" for line in tally.wrong[:SHOWN]]
        found += [f"ended twice: {line}" for line in tally.ended_twice[:SHOWN]]
        found += [f"never ended: {line}" for line in tally.never_ended[:SHOWN]]
        if tally.done != self.requests:
            found.append(f"{tally.done} of {self.requests} requests came to an end")
        if tally.full_share < self.least_full:
            found.append(
                f"full answers: {tally.full_share:.2%} of the clients that stayed, "
                f"must be {self.least_full:.2%}"
            )
        begun = {name: n for name, n in self.faults.items() if name.startswith("attempts_total")}
        begun.pop('attempts_total{cause="first"}', None)
        if begun and not self.retries:
            found.append(f"attempts were given up: {begun}")
        if rest.leaked_blocks or rest.holders:
            found.append(f"leaked: {rest.leaked_blocks} blocks {list(rest.holders)}")
        found += [f"audit: {line}" for line in rest.audit[:SHOWN]]
        found += [f"off its baseline: {name} is {value:g}" for name, value in rest.gauges.items()]
        for name, (size, descriptors, threads) in self.growth().items():
            if size > GROWTH_BYTES or max(descriptors, threads) > GROWTH_COUNT:
                found.append(
                    f"{name} grew: {size >> 20} MiB, {descriptors} descriptors, {threads} threads"
                )
        return found

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "requests": self.requests,
            "took_s": round(self.took_s, 3),
            "ends": dict(tally.ends),
            "accepted": tally.accepted,
            "full_share": round(tally.full_share, 5),
            "wrong": tally.wrong,
            "ended_twice": tally.ended_twice,
            "never_ended": tally.never_ended,
            "problems": dict(tally.problems),
            "slowest_s": round(tally.slowest_s, 3),
            "slow": tally.slow,
            "free_s": spread(tally.free_s),
            "noticed_s": {action: spread(took) for action, took in self.noticed_s.items()},
            "rest_s": round(self.rest.took_s, 3),
            "leaked_blocks": self.rest.leaked_blocks,
            "holders": list(self.rest.holders),
            "gauges_off": self.rest.gauges,
            "audit": list(self.rest.audit),
            "actions": dict(self.actions),
            "faults": dict(self.faults),
            "growth": {name: list(grown) for name, grown in self.growth().items()},
            "logs": self.log_folder,
            "complaints": self.complaints(),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    half = ordered[len(ordered) // 2]
    named = {"p50": half, "p99": p99, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(v, 3) for name, v in named.items()}}


def show(outcome: Outcome, console: Console, *, as_json: bool) -> None:
    found = outcome.as_json()
    if as_json:
        console.print(json.dumps(found), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        if name != "complaints":
            table.add_row(name, _cell(value))
    console.print(table)
    for line in found["complaints"]:
        console.print(f"FAILED  {line}", markup=False, highlight=False, soft_wrap=True)
    if not found["complaints"]:
        console.print("All held: one end each, no wrong token, nothing leaked.", highlight=False)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_cell(each) for each in value[:SHOWN]) or "-"
    return str(value)
