"""From readings to what is claimed: one row per case, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from kvrelay.services.bench.cases import Case, Work
from kvrelay.services.bench.drivers.serve import Reading
from kvrelay.services.bench.machine import Limits
from kvrelay.services.bench.measure import Cost, median_rates, rates
from kvrelay.services.bench.statistics import Interval, median_interval

OURS, AGAIN = "kvrelay", "kvrelay_again"
"""The second is the same thing in a second process: what it differs by is noise."""
PHASES = {"products": "matmul", "attention": "attention", "rest": "rest"}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step (prefill: a prompt) of ours goes, in ms."""

    step_ms: float
    parts_ms: dict[str, float]
    """`python` is what the native library did not spend: planning, sampling, the call itself."""

    def shares(self) -> dict[str, float]:
        return {name: ms / self.step_ms for name, ms in self.parts_ms.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """All about one case."""

    case: Case
    rates: dict[str, Interval]
    """Tokens per second by system."""
    peer: str | None
    """The peer with the higher median here, which the ratio is to."""
    ratio: Interval | None
    again: Interval
    """The A/A ratio."""
    cpu_ms_per_token: dict[str, float]
    breakdown: Breakdown
    work: Work
    least_ms: float
    """The machine's limits for `work`."""
    products_ms: float | None
    """Our own matrix products alone."""

    @property
    def limit_tokens_per_s(self) -> float | None:
        """If nothing but our matrix products cost anything."""
        tokens = self.case.batch * (1 if self.case.steps else self.case.prompt_tokens)
        return 1e3 * tokens / self.products_ms if self.products_ms else None

    def as_json(self) -> dict[str, object]:
        row: dict[str, object] = {"case": self.case.name}
        for name, rate in self.rates.items():
            row[f"{name}_tokens_per_s"] = round(rate.median, 1)
        for name, value in (("ratio", self.ratio), ("again", self.again)):
            for part in ("median", "low", "high"):
                row[f"{name}_{part}"] = None if value is None else round(getattr(value, part), 3)
        return {
            **row,
            "peer": self.peer,
            "cpu_ms_per_token": rounded(self.cpu_ms_per_token),
            "step_ms": round(self.breakdown.step_ms, 3),
            "breakdown_ms": rounded(self.breakdown.parts_ms),
            "breakdown_share": rounded(self.breakdown.shares()),
            "limits": self._limits(),
        }

    def _limits(self) -> dict[str, object]:
        share = self.products_ms and self.products_ms / self.breakdown.step_ms
        return {
            **asdict(self.work),
            "machine_ms": round(self.least_ms, 3),
            "machine_share": round(self.least_ms / self.breakdown.step_ms, 3),
            "matmul_only_ms": self.products_ms and round(self.products_ms, 3),
            "matmul_only_share": share and round(share, 3),
        }


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def breakdown_of(readings: Sequence[Reading], case: Case) -> Breakdown:
    """Per decode step, or per prompt, of the block with the median rate."""
    middle = sorted(readings, key=lambda r: r.seconds / r.tokens)[len(readings) // 2]
    units = middle.steps if case.steps else case.repeats
    parts = {PHASES[name]: middle.phases_s.get(name, 0.0) for name in PHASES}
    parts["python"] = middle.seconds - sum(parts.values())
    return Breakdown(1e3 * middle.seconds / units, {n: 1e3 * s / units for n, s in parts.items()})


def row_of(
    case: Case,
    by_system: Mapping[str, Sequence[Reading]],
    work: Work,
    limits: Limits,
    products_ms: float | None,
) -> Row:
    medians = median_rates(by_system)
    others = {name: rate for name, rate in medians.items() if name not in (OURS, AGAIN)}
    peer = max(others, key=lambda name: others[name]) if others else None
    return Row(
        case=case,
        rates={name: median_interval(rates(each)) for name, each in by_system.items()},
        peer=peer,
        ratio=None if peer is None else ratios(by_system[OURS], by_system[peer]),
        again=ratios(by_system[OURS], by_system[AGAIN]),
        cpu_ms_per_token={
            name: 1e3 * sum(r.cpu_seconds for r in each) / sum(r.tokens for r in each)
            for name, each in by_system.items()
        },
        breakdown=breakdown_of(by_system[OURS], case),
        work=work,
        least_ms=limits.least_ms(work),
        products_ms=products_ms,
    )


def ratios(ours: Sequence[Reading], theirs: Sequence[Reading]) -> Interval:
    """Of the rates, block by block."""
    pairs = zip(rates(ours), rates(theirs), strict=True)
    return median_interval([our / their for our, their in pairs])


def show(console: Console, rows: Sequence[Row], costs: Sequence[Cost]) -> None:
    """Tables for a person: rates and ratios, where a step goes, what it costs."""
    peers = [name for name in rows[0].rates if name not in (OURS, AGAIN)]
    console.print(_rates_table(rows, peers))
    console.print(_breakdown_table(rows))
    console.print(_limits_table(rows))
    if costs:
        console.print(_cost_table(costs))


def _rates_table(rows: Sequence[Row], peers: Sequence[str]) -> Table:
    columns = [OURS, *peers, "to the better", "A/A"]
    table = _table("tokens per second; ratios with 95 % intervals", columns)
    for row in rows:
        cells = [f"{row.rates[name].median:,.0f}" for name in (OURS, *peers)]
        ratio = _interval(row.ratio) if row.ratio else "-"
        table.add_row(row.case.name, *cells, ratio, _interval(row.again))
    return table


def _interval(value: Interval) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _breakdown_table(rows: Sequence[Row]) -> Table:
    parts = list(rows[0].breakdown.parts_ms)
    table = _table("a step of kvrelay (prefill: a prompt), ms", ["step", *parts])
    for row in rows:
        shares = row.breakdown.shares()
        cells = [f"{row.breakdown.parts_ms[n]:.2f} {shares[n]:4.0%}" for n in parts]
        table.add_row(row.case.name, f"{row.breakdown.step_ms:.2f}", *cells)
    return table


def _limits_table(rows: Sequence[Row]) -> Table:
    columns = ["MB", "GFLOP", "machine's limit", "matmul alone"]
    table = _table("what a step needs, and the least ms for it, of the step's", columns)
    for row in rows:
        step_ms, alone_ms = row.breakdown.step_ms, row.products_ms
        table.add_row(
            row.case.name,
            f"{(row.work.weight_bytes + row.work.kv_bytes) / 1e6:,.0f}",
            f"{row.work.flops / 1e9:,.1f}",
            f"{row.least_ms:.2f} {row.least_ms / step_ms:4.0%}",
            "-" if alone_ms is None else f"{alone_ms:.2f} {alone_ms / step_ms:4.0%}",
        )
    return table


def _cost_table(costs: Sequence[Cost]) -> Table:
    batches = sorted({cost.batch for cost in costs})
    title = "ms of a bare decode step by batch, and below it per sequence"
    table = _table(title, [str(batch) for batch in batches], first="context")
    for context in sorted({cost.context for cost in costs}):
        each = {cost.batch: cost.step_ms for cost in costs if cost.context == context}
        cells = [
            "-" if (ms := each[batch]) is None else f"{ms:.1f}\n{ms / batch:.2f}"
            for batch in batches
        ]
        table.add_row(f"{context:,}", *cells)
    return table


def _table(title: str, columns: Sequence[str], first: str = "case") -> Table:
    """Of numbers, but for the first column."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table
