"""The report as one picture: tokens per second by case and system, below our limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.services.bench.errors import BenchError
from kvrelay.services.bench.report import AGAIN, OURS, Row
from kvrelay.services.bench.statistics import Interval

COLOURS = {OURS: "#1f5fa8", "vllm": "#e08a1e", "llamacpp": "#7a8793"}
LABELS = {"llamacpp": "llama.cpp", "vllm": "vLLM"}
LIMIT = "limit: kvrelay's matrix products alone"
BAR_WIDTH = 0.26


def require_matplotlib() -> None:
    """Raises `BenchError` when pictures cannot be made here."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        raise BenchError("plot: needs matplotlib; `pip install 'kvrelay[bench]'` gets it") from None


def draw(rows: Sequence[Row], machine: Mapping[str, object], file: Path) -> None:
    """Write a PNG: a panel for prefill and one for decode, whose scales differ."""
    from matplotlib import pyplot

    panels = [
        ("prefill: tokens in the prompt", [row for row in rows if not row.case.steps]),
        ("decode: sequences in a step", [row for row in rows if row.case.steps]),
    ]
    shown = [(title, some) for title, some in panels if some]
    figure, axes = pyplot.subplots(
        1,
        len(shown),
        figsize=(2.4 + 1.4 * len(rows), 4.8),
        width_ratios=[len(some) for _, some in shown],
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, some) in zip(axes[0], shown, strict=True):
        _panel(axis, some)
        axis.set_title(title, fontsize=10)
    axes[0][0].set_ylabel("tokens per second")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda at: labels[at] == LIMIT)
    figure.legend(
        [handles[at] for at in order],
        [labels[at] for at in order],
        loc="outside upper center",
        ncols=len(labels),
        frameon=False,
    )
    figure.supxlabel(_footnote(rows, machine), fontsize=8, color="#555555")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _footnote(rows: Sequence[Row], machine: Mapping[str, object]) -> str:
    what = (
        f"{Path(str(machine['model'])).stem}, {machine['dtype']}, {machine['threads']} threads, "
        f"{machine['processor']}. Medians, 95 % intervals."
    )
    compared = any(row.ratio for row in rows)
    return what + ("\nUnder each case: kvrelay to the better peer." if compared else "")


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    systems = [name for name in rows[0].rates if name != AGAIN]
    width = min(BAR_WIDTH, 0.8 / len(systems))
    for number, name in enumerate(systems):
        offset = (number - (len(systems) - 1) / 2) * width
        each = [row.rates[name] for row in rows]
        bars = axis.bar(
            [at + offset for at in range(len(rows))],
            [value.median for value in each],
            width * 0.94,
            yerr=_errors(each),
            label=LABELS.get(name, name),
            color=COLOURS.get(name),
            error_kw={"elinewidth": 1.1, "capsize": 2, "ecolor": "#333333"},
        )
        # On white, for a limit or an interval may pass behind it.
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.4}
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=3, bbox=box, zorder=5)
    reach = width * len(systems) / 2 + 0.04
    for at, row in enumerate(rows):
        if (limit := row.limit_tokens_per_s) is not None:
            label = LIMIT if at == 0 else None
            axis.hlines(limit, at - reach, at + reach, colors="#b3261e", lw=1.8, label=label)
    axis.set_xticks(range(len(rows)), [_tick(row) for row in rows])
    axis.margins(y=0.08)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="y", color="#e3e3e3", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _errors(each: Sequence[Interval]) -> list[list[float]]:
    below = [value.median - value.low for value in each]
    return [below, [value.high - value.median for value in each]]


def _tick(row: Row) -> str:
    size = row.case.batch if row.case.steps else row.case.prompt_tokens
    return f"{size:,}" + (f"\n{row.ratio.median:.2f}x" if row.ratio else "")
