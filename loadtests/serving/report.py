"""A run as tables for a person and as JSON for a machine."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from loadtests.serving.figures import (
    BARS,
    Bar,
    Visit,
    again_ratios,
    ratios,
    samples_of,
)
from rich.console import Console
from rich.table import Table

from kvrelay.services.bench.statistics import Interval, median_interval


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was measured."""

    machine: Mapping[str, object]
    visits: Sequence[Visit]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one scenario over all blocks."""

    scenario: str
    figure: str
    medians: Mapping[str, float]
    """By system."""
    ratio: Interval | None
    """Ours to the better peer, per block."""
    again: Interval | None
    """Ours a second time to the first, per block."""

    def as_json(self) -> dict[str, object]:
        """Flat: `vllm`, `ratio_median`, `again_low` and so on."""
        spreads = {"ratio": self.ratio, "again": self.again}
        return {
            "scenario": self.scenario,
            "figure": self.figure,
            **{system.replace(" ", "_"): value for system, value in self.medians.items()},
            **{
                f"{name}_{part}": value
                for name, spread in spreads.items()
                if spread is not None
                for part, value in asdict(spread).items()
            },
        }


def rows(visits: Sequence[Visit]) -> list[Row]:
    names = dict.fromkeys((visit.row, figure) for visit in visits for figure in visit.figures)
    return [_row(visits, scenario, figure) for scenario, figure in names]


def _row(visits: Sequence[Visit], scenario: str, figure: str) -> Row:
    samples = samples_of(visits, scenario, figure)
    medians = {system: statistics.median(blocks.values()) for system, blocks in samples.items()}
    compared, repeated = ratios(samples, figure), again_ratios(samples)
    return Row(
        scenario,
        figure,
        medians,
        median_interval(compared) if compared else None,
        median_interval(repeated) if repeated else None,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run says of a bar; of nothing measured it says nothing."""

    bar: str
    holds: bool | None
    value: Interval | None


def verdict(bar: Bar, visits: Sequence[Visit]) -> Verdict:
    values = bar.values(visits)
    if not values:
        return Verdict(bar.words(), None, None)
    value = median_interval(values)
    return Verdict(bar.words(), bar.holds(value.median), value)


def as_json(run: Run) -> str:
    return json.dumps(
        {
            "machine": run.machine,
            "settings": run.settings,
            "rows": [row.as_json() for row in rows(run.visits)],
            "bars": [asdict(verdict(bar, run.visits)) for bar in BARS],
            "visits": [asdict(visit) for visit in run.visits],
        },
        indent=1,
    )


def show(run: Run, console: Console) -> None:
    for row in dict.fromkeys(visit.row for visit in run.visits):
        console.print(_table(row, run.visits))
    bars = Table(title="Bars", title_justify="left")
    for heading in ("bar", "median (interval)", "holds"):
        bars.add_column(heading)
    for bar in BARS:
        said = verdict(bar, run.visits)
        holds = {None: "not told", True: "yes", False: "NO"}[said.holds]
        bars.add_row(said.bar, _spread(said.value), holds)
    console.print(bars)


def _table(scenario: str, visits: Sequence[Visit]) -> Table:
    systems = list(dict.fromkeys(visit.system for visit in visits))
    table = Table(title=scenario, title_justify="left")
    table.add_column("figure")
    for system in systems:
        table.add_column(system, justify="right")
    table.add_column("to the better peer")
    table.add_column("again / first")
    for row in rows([visit for visit in visits if visit.row == scenario]):
        cells = [_number(row.medians.get(system, math.nan)) for system in systems]
        table.add_row(row.figure, *cells, _spread(row.ratio), _spread(row.again))
    return table


def _number(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.0f}"


def _spread(value: Interval | None) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})" if value else ""
