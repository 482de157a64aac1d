"""How a step's allowance is shared out among prompts."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.shared.engine.rows import Allowance, work_of, work_of_rows
from kvrelay.shared.engine.state import EngineLimits, Leg
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import LegRef, LegSpec, SamplingParams

SIZE, STEP_TOKENS, EVEN = 16, 512, 3072


def leg(prompt: int, computed: int) -> Leg:
    tokens = [1] * prompt
    spec = LegSpec("leg", tuple(tokens), SamplingParams())
    return Leg("", LegRef("leg", 0, 0), spec, Phase.RUNNING, known=tokens, computed=computed)


def allowance(work: int, tokens: int = STEP_TOKENS, even: int = EVEN) -> Allowance:
    limits = EngineLimits(SIZE, 8, STEP_TOKENS, 10**6, 100, b"", even_context=even)
    return Allowance(limits, tokens, work)


def chunks(prompt: int, work: int) -> list[int]:
    it = leg(prompt, 0)
    counts = []
    while it.pending:
        counts.append(len(allowance(work).take(it).tokens))
        it.computed += counts[-1]
    return counts


def test_a_prompt_is_cut_into_pieces_of_the_same_work() -> None:
    counts = chunks(6144, 256)
    assert (counts[0], counts[-2]) == (240, 80), "at two even contexts a token is three times one"
    starts = [sum(counts[:i]) for i in range(len(counts))]
    works = [work_of(start, count, EVEN) for start, count in zip(starts, counts, strict=True)]
    assert max(works[:-1]) - min(works[:-1]) <= 4 * SIZE, "half a block each way, of threefold work"


def test_where_context_costs_nothing_tokens_are_counted() -> None:
    it, left = leg(1000, 40), allowance(100, even=0)
    assert len(left.take(it).tokens) == 100
    assert left.spent


@given(
    st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 2000), st.integers(1, STEP_TOKENS)
)
@example(8016, 8000, 1, 1)
def test_what_is_taken_moves_on_ends_at_a_block_and_is_what_was_allowed(
    pending: int, computed: int, work: int, tokens: int
) -> None:
    it, left = leg(computed + pending, computed), allowance(work, tokens)
    row = left.take(it)
    count = len(row.tokens)
    assert 1 <= count <= min(pending, tokens)
    assert row.sample == (count == pending)
    end = computed + count
    assert count == pending or left.tokens == 0 or end % SIZE == 0
    next_border = computed // SIZE * SIZE + SIZE
    block = work_of(end, SIZE, EVEN)
    assert end <= next_border or work_of(computed, count, EVEN) <= work + block // 2 + 1
    assert end >= min(next_border, computed + pending, computed + tokens)
    assert left.work == work - work_of(computed, count, EVEN) == work - work_of_rows(
        [row], EVEN
    ) or (count == 1)
