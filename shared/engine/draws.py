"""From a step's logits to its tokens and what is told of them: by the reference or in the step.

Of each row the positions in `told` come first, and then the one that is drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrelay.kernels.native.step import NOT_TOLD, Drawing, DrawStatus
from kvrelay.kernels.native.step import Draw as NativeDraw
from kvrelay.shared.engine.plan import PlannedRow, StepResult
from kvrelay.shared.sampling.logprobs import logprobs_of
from kvrelay.shared.sampling.sampler import BadLogits, Draw, Logits, check, sample
from kvrelay.shared.types import Logprobs

_LARGEST = {
    int(DrawStatus.NAN): "nan",
    int(DrawStatus.INFINITE): "inf",
    int(DrawStatus.NOTHING): "-inf",
}


def wanted_of(row: PlannedRow) -> range:
    """Which of the row's tokens need logits."""
    count = len(row.tokens)
    if row.told:
        return range(len(row.told) + row.sample)
    return range(count - 1, count) if row.sample else range(0)


# ---- by the reference -------------------------------------------------------------------------


def draw_tokens(
    rows: Iterable[tuple[PlannedRow, Sequence[Logits]]], vocab_limit: int, result: StepResult
) -> None:
    """What the rows give, each from its wanted logits. One bad row harms no other."""
    for row, logits in rows:
        try:
            _draw_row(row, [each[:vocab_limit] for each in logits], result)
        except BadLogits as error:
            result.failed[row.key] = str(error)


def _draw_row(row: PlannedRow, logits: Sequence[Logits], result: StepResult) -> None:
    how = row.sampling
    if row.told:
        told = []
        for token, bare in zip(row.told, logits, strict=False):
            check(bare)
            told.append(logprobs_of(bare, token, how.prompt_logprobs or 0))
        result.prompt_logprobs[row.key] = told
    if not row.sample:
        return
    bare = logits[-1]
    if how.logprobs is not None:
        check(bare)
    token = sample(bare, how, Draw(row.choice, row.index, row.banned, None, row.edits))
    result.sampled[row.key] = token
    if how.logprobs is not None:
        result.logprobs[row.key] = logprobs_of(bare, token, how.logprobs)


# ---- inside the native step -------------------------------------------------------------------


def native_draws(rows: Iterable[PlannedRow], vocab_limit: int) -> list[NativeDraw]:
    """What the library is told to draw and to tell, for each wanted token."""
    draws: list[NativeDraw] = []
    for row in rows:
        tops = row.sampling.prompt_logprobs or 0
        draws += [given_draw(token, tops, vocab_limit) for token in row.told]
        if row.sample:
            draws.append(native_draw(row, vocab_limit))
    return draws


def native_draw(row: PlannedRow, vocab_limit: int) -> NativeDraw:
    """The next token of a row."""
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
        tops=NOT_TOLD if how.logprobs is None else how.logprobs,
        banned=row.banned,
        edits=row.edits,
    )


def given_draw(token: int, tops: int, vocab_limit: int) -> NativeDraw:
    """Of a token that is known, and only told of."""
    return NativeDraw(0.0, 1.0, 0.0, 0, 0, 0, 0, vocab_limit, given=token, tops=tops)


def drawn_tokens(
    rows: Iterable[PlannedRow], drawing: Drawing, vocab_limit: int, result: StepResult
) -> None:
    """What the library drew and told for these rows, as `draw_tokens` gives it, in its words."""
    drawn, at = drawing.drawn, 0
    for row in rows:  # plain indexing: right after a step, each further call costs microseconds
        if row.told:
            bad = _take_told(row, drawing, at, vocab_limit, result)
            at += len(row.told)
            if bad or not row.sample:
                at += row.sample
                continue
        if status := drawn[2 * at + 1]:
            result.failed[row.key] = _why_none(status, vocab_limit)
        else:
            result.sampled[row.key] = drawn[2 * at]
            if row.sampling.logprobs is not None:
                [told] = _told(drawing, at, at + 1, row.sampling.logprobs)
                result.logprobs[row.key] = told
        at += 1


def _take_told(
    row: PlannedRow, drawing: Drawing, at: int, vocab_limit: int, result: StepResult
) -> bool:
    """Whether a logit of them is no number, and so the row fails."""
    end = at + len(row.told)
    bad = [status for status in drawing.drawn[2 * at + 1 : 2 * end : 2] if status]
    if bad:
        result.failed[row.key] = _why_none(bad[0], vocab_limit)
    else:
        tops = row.sampling.prompt_logprobs or 0
        result.prompt_logprobs[row.key] = _told(drawing, at, end, tops)
    return bool(bad)


def _told(drawing: Drawing, start: int, end: int, tops: int) -> list[Logprobs]:
    assert drawing.told is not None
    told = drawing.told[start:end]
    ids, values = told["ids"][:, :tops].tolist(), told["logprobs"][:, :tops].tolist()
    return [
        Logprobs(
            logprob,
            rank,
            tuple([pair for pair in zip(some, their, strict=True) if pair[0] >= 0]),
        )
        for logprob, rank, some, their in zip(
            told["logprob"].tolist(), told["rank"].tolist(), ids, values, strict=True
        )
    ]


def _why_none(status: int, vocab_limit: int) -> str:
    return f"the largest of {vocab_limit} logits is {_LARGEST[status]}, which gives no token"
