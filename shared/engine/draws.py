"""From a step's logits to its tokens: by the reference sampler, or drawn inside the native step."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.kernels.native.step import Draw as NativeDraw
from kvrelay.kernels.native.step import Drawing, DrawStatus
from kvrelay.shared.engine.plan import PlannedRow
from kvrelay.shared.sampling.sampler import BadLogits, Draw, Logits, sample

_LARGEST = {
    int(DrawStatus.NAN): "nan",
    int(DrawStatus.INFINITE): "inf",
    int(DrawStatus.NOTHING): "-inf",
}


def draw_tokens(
    rows: Iterable[tuple[PlannedRow, Logits]], vocab_limit: int
) -> tuple[dict[str, int], dict[str, str]]:
    """The next token of each row, or why it has none, by row key. One bad row harms no other."""
    sampled: dict[str, int] = {}
    failed: dict[str, str] = {}
    for row, logits in rows:
        draw = Draw(row.choice, row.index, row.banned, vocab_limit)
        try:
            sampled[row.key] = sample(logits, row.sampling, draw)
        except BadLogits as error:
            failed[row.key] = str(error)
    return sampled, failed


def native_draw(row: PlannedRow, vocab_limit: int) -> NativeDraw:
    """What the library is told to draw for this row."""
    how = row.sampling
    return NativeDraw(
        how.temperature,
        how.top_p,
        how.min_p,
        how.seed,
        row.choice,
        row.index,
        how.top_k,
        vocab_limit,
        row.banned,
    )


def drawn_tokens(
    rows: Iterable[PlannedRow], drawing: Drawing, vocab_limit: int
) -> tuple[dict[str, int], dict[str, str]]:
    """What the library drew for these rows, as `draw_tokens` gives it, in the same words."""
    sampled: dict[str, int] = {}
    failed: dict[str, str] = {}
    drawn, at = drawing.drawn, 0
    for row in rows:  # plain indexing: right after a step, each further call costs microseconds
        if status := drawn[at + 1]:
            largest = _LARGEST[status]
            failed[row.key] = (
                f"the largest of {vocab_limit} logits is {largest}, which gives no token"
            )
        else:
            sampled[row.key] = drawn[at]
        at += 2
    return sampled, failed
