"""From a step's logits to its tokens: the same for every runner."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.shared.engine.plan import PlannedRow
from kvrelay.shared.sampling.sampler import BadLogits, Draw, Logits, sample


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
