"""The sampler as a function: exact ids for known noise, filters, bans and errors."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrelay.shared.sampling.edits import Edits, apply, mask_of
from kvrelay.shared.sampling.logprobs import logprobs_of
from kvrelay.shared.sampling.sampler import BadLogits, Draw, sample, uniform
from kvrelay.shared.types import MAX_SEED, Logprobs, SamplingParams

FIRST = Draw(choice=0, index=0)


def row(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def drawn(logits: NDArray[np.float32], count: int = 400, **params: float) -> set[int]:
    """Every id that appears in `count` draws of one seed."""
    settings = SamplingParams(seed=5, **params)
    return {sample(logits, settings, Draw(0, index)) for index in range(count)}


def test_noise_is_the_published_philox_vector() -> None:
    # Random123's known answer for philox4x64-10 with counter and key zero: first word.
    assert uniform(0, 0, 0) == (0x16554D9ECA36314C >> 11) / 2**53


def test_noise_differs_by_seed_choice_and_index() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MAX_SEED, 0, 0)]
    assert len({uniform(*key) for key in keys}) == 5


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sample(row(1, 3, 2, 3), SamplingParams(temperature=0), FIRST) == 1


def test_noise_inverts_the_distribution_in_vocabulary_order() -> None:
    logits = np.log(row(0.1, 0.2, 0.3, 0.4))
    edges = np.array([0.1, 0.3, 0.6])
    for index in range(50):
        expected = int(np.searchsorted(edges, uniform(9, 2, index), side="right"))
        assert sample(logits, SamplingParams(seed=9), Draw(2, index)) == expected


def test_temperature_sharpens() -> None:
    assert drawn(row(0, 1, 2), temperature=0.01) == {2}
    assert drawn(row(0, 1, 2), temperature=10.0) == {0, 1, 2}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.31}, {1, 3}),
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 0.5}, {0, 1, 2, 3}),
        ({"min_p": 0.9}, {1, 3}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1, 3}),
        ({"top_k": 3, "min_p": 0.9}, {1, 3}),
    ],
)
def test_filters_keep_exactly_these(params: dict[str, float], kept: set[int]) -> None:
    # Ids 1 and 3 tie at the top, 0 and 2 below: of a tie the lower id ranks first.
    logits = np.log(row(0.16, 0.305, 0.16, 0.305, 0.07))
    assert drawn(logits, **params) == kept


def test_a_nucleus_wider_than_the_first_guess_is_found() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    assert drawn(logits, count=6000, top_p=0.3) == set(range(300))


def test_banned_ids_are_never_drawn_and_the_row_is_left_alone() -> None:
    logits = row(5, 1, 1)
    assert sample(logits, SamplingParams(temperature=0), Draw(0, 0, banned=(0,))) == 1
    assert {sample(logits, SamplingParams(), Draw(0, i, banned=(0, 2, 70))) for i in range(50)} == {
        1
    }
    assert logits.tolist() == [5, 1, 1]


def test_ids_past_the_vocabulary_are_never_drawn() -> None:
    logits = row(1, 2, 9, 9)
    assert sample(logits, SamplingParams(temperature=0), Draw(0, 0, vocab_limit=2)) == 1
    assert {sample(logits, SamplingParams(), Draw(0, i, vocab_limit=2)) for i in range(50)} == {
        0,
        1,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(BadLogits, match=f"the largest of 3 logits is {bad}"):
        sample(row(1, bad, 2), SamplingParams(temperature=temperature), FIRST)


def test_nothing_left_to_draw_is_an_error() -> None:
    with pytest.raises(BadLogits, match="the largest of 2 logits is -inf"):
        sample(row(1, 2), SamplingParams(), Draw(0, 0, banned=(0, 1)))


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    top_k=st.integers(0, 50),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(1e-6, 100),
    index=st.integers(0, 10**6),
)
def test_any_settings_draw_an_id_at_least_as_likely_as_all_that_were_cut(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, index: int
) -> None:
    values = row(*logits)
    params = SamplingParams(temperature, top_p, top_k, min_p, seed=3)
    token = sample(values, params, Draw(0, index))
    rank = sum(1 for other, value in enumerate(values) if (-value, other) < (-values[token], token))
    assert top_k == 0 or rank < top_k
    weights = np.exp((values.astype(float) - values.max()) / temperature)
    assert weights[token] >= min_p


def edited(logits: NDArray[np.float32], **edits: object) -> list[float]:
    copy = logits.copy()
    apply(copy, Edits(**edits))  # type: ignore[arg-type]
    return [round(value, 4) for value in copy.tolist()]


def test_penalties_are_of_known_ids_and_of_what_the_answer_has() -> None:
    logits, known = row(2, -2, 4, 4), array("i", [0, 0, 1, 2, 2, 1])
    assert edited(logits, repetition=2.0, known=known) == [1, -4, 2, 4]
    assert edited(logits, presence=0.5, known=known) == [2, -2.5, 3.5, 4]
    assert edited(logits, frequency=0.5, known=known) == [2, -3, 3.5, 4]
    together = {"repetition": 2.0, "presence": 0.5, "frequency": 0.25}
    assert edited(logits, **together, known=known) == [1, -5, 1.25, 4]


def test_penalties_come_before_biases_and_these_before_masks() -> None:
    logits = row(2, 2, 2)
    known, biased = array("i", [0, 0]), array("i", [0, 1])
    edits = {"repetition": 2.0, "known": known, "biased": biased, "bias": array("d", [3, 3])}
    assert edited(logits, **edits) == [4, 5, 2]
    assert edited(logits, **edits, masks=[mask_of([0, 2], 3)]) == [4, -np.inf, 2]
    both = [mask_of([0, 2], 3), mask_of([0, 1], 3)]
    assert edited(logits, **edits, masks=both) == [4, -np.inf, -np.inf]


def test_edits_spoil_nothing_and_mend_nothing() -> None:
    most = float(np.finfo(np.float32).max)
    logits = row(1, -1, np.inf, -np.inf, np.nan)
    all_known = array("i", [0, 1, 1, 1, 2, 1, 3, 1, 4, 1, 5, 1, -1, 1])
    got = edited(logits, repetition=1e-300, presence=-1e300, known=all_known)
    assert got[:4] == [most, most, np.inf, -np.inf] and np.isnan(got[4])
    ids = array("i", [0, 1, 2, 3, 4, 5, -1])
    got = edited(logits, biased=ids, bias=array("d", [-1e40] * 7))
    assert got[:4] == [-most, -most, np.inf, -np.inf] and np.isnan(got[4])


@given(
    st.lists(st.integers(0, 99), max_size=20), st.integers(1, 100), st.floats(0, 2), st.integers(0)
)
def test_what_a_mask_lacks_is_never_drawn(
    ids: list[int], vocab: int, temperature: float, seed: int
) -> None:
    params = SamplingParams(temperature, seed=seed % MAX_SEED)
    logits = np.linspace(-5, 5, vocab, dtype=np.float32)
    draw = Draw(0, 0, edits=Edits(masks=[mask_of(ids, vocab)]))
    allowed = {token for token in ids if token < vocab}
    if allowed:
        assert sample(logits, params, draw) in allowed
    else:
        with pytest.raises(BadLogits, match=f"the largest of {vocab} logits is -inf"):
            sample(logits, params, draw)


def test_logprobs_are_those_of_the_softmax_and_ranks_those_of_the_order() -> None:
    logits = np.log(row(0.1, 0.3, 0.3, 0.1, 0.2)) + np.float32(7)
    told = logprobs_of(logits, 2, 3)
    assert told.chosen == pytest.approx(np.log(0.3), abs=1e-6)
    assert (told.rank, [token for token, _ in told.top]) == (2, [1, 2, 4])
    assert [value for _, value in told.top] == pytest.approx(np.log([0.3, 0.3, 0.2]), abs=1e-6)
    assert logprobs_of(logits, 3, 0) == Logprobs(pytest.approx(np.log(0.1), abs=1e-6), 5, ())
    assert len(logprobs_of(logits, 3, 20).top) == 5, "there are no more"


def test_an_impossible_id_has_the_logprob_minus_infinity() -> None:
    assert logprobs_of(row(0, -np.inf), 1, 2) == Logprobs(-np.inf, 2, ((0, 0.0), (1, -np.inf)))
