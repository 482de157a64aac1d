"""Draws inside the native library beside the reference sampler: the same ids in every variant."""

from __future__ import annotations

import functools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.native import int32, open_library, random_model, shape_of

from kvrelay.kernels.native.binding import NativeError, NativeModel, Pool, Variant
from kvrelay.kernels.native.step import Batch, Draw, Drawing, DrawStatus, Floats
from kvrelay.shared.engine.draws import draw_tokens, drawn_tokens, native_draw
from kvrelay.shared.engine.plan import PlannedRow, StepResult
from kvrelay.shared.sampling.edits import Edits, mask_of
from kvrelay.shared.sampling.sampler import Draw as ReferenceDraw
from kvrelay.shared.sampling.sampler import sample
from kvrelay.shared.types import MAX_LOGPROBS, MAX_SEED, Logprobs, SamplingParams

LIBRARY = open_library()
ROWS = {1: 100, 2: 200, 63: 300, 64: 300, 101: 500, 1001: 700, 4097: 500, 49152: 100}
"""Cases by width of the vocabulary."""


def open_model(vocab: int, variant: Variant, threads: int = 2) -> NativeModel:
    return NativeModel(LIBRARY, shape_of(vocab=vocab), variant, threads)


def random_logits(draw: np.random.Generator, vocab: int) -> Floats:
    row = draw.standard_normal(vocab) * draw.choice([0.01, 1, 4, 30]) + draw.choice([0, 0, -20, 9])
    kind = draw.integers(10)
    if kind < 3:  # ties, many of them at the top; of zeros, some are negative
        row = np.minimum(np.round(row), 1) * draw.choice([1, -1], vocab)
    elif kind == 3:
        row = np.zeros(vocab)
    if draw.random() < 0.3:
        row[draw.random(vocab) < draw.choice([0.3, 0.99])] = -np.inf
    if draw.random() < 0.1:
        row[draw.integers(vocab)] = draw.choice([np.nan, np.inf, -np.nan])
    return row.astype(np.float32)


def random_edits(draw: np.random.Generator, logits: Floats) -> Edits | None:
    """Also of ids that there are not, of the likeliest, and by numbers that leave float32."""
    vocab = len(logits)
    if draw.random() < 0.5:
        return None
    ids = np.unique([np.argmax(logits), vocab, -1, *draw.integers(0, vocab, vocab // 3)])
    known = np.stack([ids, draw.integers(0, 4, len(ids))], axis=1).astype(np.int32)
    biased = draw.permutation(ids)[: draw.integers(0, len(ids))].astype(np.int32)
    masks = [mask_of(draw.integers(0, vocab, vocab).tolist(), vocab) for _ in range(3)]
    return Edits(
        repetition=float(draw.choice([1, 1.3, 0.5, 4])),
        presence=float(draw.choice([0, 0.7, -2, 1e300])),
        frequency=float(draw.choice([0, 0.3, 2])),
        known=array("i", known.tobytes()) if draw.random() < 0.7 else array("i"),
        biased=array("i", biased.tobytes()),
        bias=array(
            "d", (draw.choice([0.5, 100, 1e40], len(biased)) * draw.choice([1, -1])).tobytes()
        ),
        masks=masks[: draw.choice([0, 0, 1, 2])],
    )


def random_row(draw: np.random.Generator, key: str, logits: Floats) -> PlannedRow:
    vocab = len(logits)
    banned = [int(draw.choice([0, vocab - 1, vocab, np.argmax(logits), draw.integers(vocab)]))]
    sampling = SamplingParams(
        temperature=float(draw.choice([0, 1e-3, 0.1, 0.8, 0.8, 1, 1, 5])),
        top_p=float(draw.choice([1, 1, 0.95, 0.9, 0.5, 1e-9, 0, 1 - 1e-12])),
        top_k=int(draw.choice([0, 0, 1, 2, 5, 50, 999, vocab - 1, vocab, 2**31 - 1])),
        min_p=float(draw.choice([0, 0, 0, 0.05, 0.5, 1])),
        seed=int(draw.choice([0, MAX_SEED, draw.integers(MAX_SEED)])),
        logprobs=[None, None, 0, 1, 5, MAX_LOGPROBS][draw.integers(6)],
    )
    return PlannedRow(
        key,
        [],
        0,
        [],
        True,
        sampling,
        choice=int(draw.integers(3)),
        index=int(draw.choice([0, 1, 2**40, draw.integers(10**6)])),
        banned=tuple(banned * int(draw.choice([0, 0, 1, 3]))),
        edits=random_edits(draw, logits),
    )


@functools.cache
def cases(vocab: int) -> tuple[list[PlannedRow], Floats]:
    draw = np.random.default_rng(vocab)
    logits = np.stack([random_logits(draw, vocab) for _ in range(ROWS[vocab])])
    return [random_row(draw, str(at), row) for at, row in enumerate(logits)], logits


@functools.cache
def expected(vocab: int, limit: int) -> StepResult:
    rows, logits = cases(vocab)
    result = StepResult(0)
    draw_tokens(zip(rows, logits[:, None], strict=True), limit, result)
    return result


def check_logprobs(got: dict[str, Logprobs], wanted: dict[str, Logprobs]) -> None:
    """Ids and ranks are equal; of numbers the last bit may differ, for sums do."""
    assert got.keys() == wanted.keys()
    for key, told in got.items():
        assert told.rank == wanted[key].rank
        assert [token for token, _ in told.top] == [token for token, _ in wanted[key].top]
        values = [told.chosen, *(value for _, value in told.top)]
        theirs = [wanted[key].chosen, *(value for _, value in wanted[key].top)]
        np.testing.assert_allclose(values, theirs, rtol=1.2e-7, atol=1e-12)


@pytest.mark.parametrize("vocab", ROWS)
@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_ids_and_failures_are_those_of_the_reference(variant: Variant, vocab: int) -> None:
    """Their sums differ in the last bits, by 1e-13 of a row: no draw of these comes so near."""
    model = open_model(vocab, variant)
    rows, logits = cases(vocab)
    for limit in {vocab, vocab // 2 + 1}:
        drawn = model.draw(logits, [native_draw(row, limit) for row in rows])
        result = StepResult(0)
        drawn_tokens(rows, drawn, limit, result)
        wanted = expected(vocab, limit)
        assert (result.sampled, result.failed) == (wanted.sampled, wanted.failed)
        check_logprobs(result.logprobs, wanted.logprobs)
    model.close()


@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_noise_is_the_philox_number_of_the_reference(variant: Variant) -> None:
    size = 2**15  # equal logits: the id is the number's first bits
    model = open_model(size, variant)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MAX_SEED, 127, 2**32)]
    flat = np.zeros((len(keys), size), np.float32)
    draws = [Draw(1.0, 1.0, 0.0, *key, 0, size) for key in keys]
    wanted = [
        sample(flat[0], SamplingParams(seed=seed), ReferenceDraw(choice, index))
        for seed, choice, index in keys
    ]
    assert model.draw(flat, draws).tokens == wanted
    # Random123's known answer for philox4x64-10 with counter and key zero: first word.
    assert wanted[0] == 0x16554D9ECA36314C >> (64 - 15)
    model.close()


def told_bits(drawing: Drawing, at: int, tops: int) -> list[bytes]:
    assert drawing.told is not None
    told = drawing.told[at]
    return [told[name][..., :tops].tobytes() if tops else b"" for name in ("ids", "logprobs")] + [
        told[name].tobytes() for name in ("logprob", "rank")
    ]


@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_rows_stand_alone(variant: Variant) -> None:
    rows, logits = cases(1001)
    together = open_model(1001, variant, threads=3)
    draws = [native_draw(row, 1000) for row in rows]
    many = together.draw(logits, draws)
    alone = open_model(1001, variant, threads=1)
    for at in range(0, len(rows), 7):
        one = alone.draw(logits[at : at + 1], draws[at : at + 1])
        assert (one.tokens[0], one.statuses[0]) == (many.tokens[at], many.statuses[at])
        if draws[at].tops >= 0 and one.statuses == [DrawStatus.DRAWN]:
            assert told_bits(one, 0, draws[at].tops) == told_bits(many, at, draws[at].tops)
    together.close()
    alone.close()


def exact_logprobs(logits: Floats, tokens: list[int]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN and infinite rows give NaN
        wide -= wide.max(axis=1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide[np.arange(len(wide)), tokens]


@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_given_tokens_are_told_of_and_not_drawn(variant: Variant) -> None:
    """In the softmax of the bare logits below the limit; nothing is told unless asked for."""
    rows, logits = cases(1001)
    model = open_model(1001, variant)
    given = [at % 900 for at in range(len(rows))]
    how = [
        native_draw(row, 900)._replace(given=token, tops=3, banned=(token,))
        for row, token in zip(rows, given, strict=True)
    ]
    drawn = model.draw(logits, how)
    good = np.array(drawn.statuses) == DrawStatus.DRAWN
    finite = np.isfinite(logits[:, :900].max(axis=1))
    assert (good == finite).all() and 400 < good.sum() < len(rows)
    assert np.array(drawn.tokens)[good].tolist() == np.array(given)[good].tolist()
    assert drawn.told is not None
    exact = exact_logprobs(logits[:, :900], given)
    np.testing.assert_allclose(drawn.told["logprob"][good], exact[good], rtol=1.2e-7, atol=1e-12)
    assert model.draw(logits[:1], [Draw(1.0, 1.0, 0.0, 0, 0, 0, 0, 900)]).told is None
    model.close()


@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_weights_are_exponentials_within_1e15(variant: Variant) -> None:
    vocab = 20_000
    model = open_model(vocab, variant, threads=1)
    logits = -np.geomspace(1e-12, 700, vocab).astype(np.float32)
    logits[0] = 0.0
    model.draw(logits[None], [Draw(1.0, 1.0, 0.0, 0, 0, 0, 0, vocab)])
    weights = model.draw_memory.of.view(np.float64)[:vocab]
    exact = np.exp(logits.astype(np.longdouble))
    assert weights[0] == 1.0
    assert float(np.abs(weights / exact - 1).max()) < 5e-16
    model.close()


@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_a_step_draws_from_the_logits_that_it_gives(variant: Variant) -> None:
    model, _ = random_model(LIBRARY, shape_of(vocab=900, dtype=1), variant)
    pool = np.zeros((4, 1, 2, 1, 16, 40), np.uint16)
    place = Pool(pool.ctypes.data, 4)
    batch = Batch(
        tokens=int32([1, 2, 3, 4, 5]),
        starts=int32([0, 0, 0]),
        counts=int32([2, 1, 2]),
        tables=int32([0, 1, 2]),
        wanted=int32([4, 1]),
    )
    logits = model.step(batch, place)
    params = SamplingParams(temperature=3.0, top_p=0.9, seed=8)
    draws = [Draw(3.0, 0.9, 0.0, 8, choice, 0, 0, 900) for choice in (0, 1)]
    drawing = Drawing([draw._replace(tops=0) for draw in draws])
    for index in range(20):
        drawing.at([index, index + 5])
        model.step_and_draw(batch, place, drawing)
        wanted = [sample(logits[at], params, ReferenceDraw(at, index + 5 * at)) for at in (0, 1)]
        assert drawing.tokens == wanted
        assert drawing.told is not None
        np.testing.assert_allclose(
            drawing.told["logprob"], exact_logprobs(logits, wanted), rtol=1e-6
        )
    model.close()


def test_a_limit_beyond_the_vocabulary_is_refused() -> None:
    model = open_model(101, Variant.PORTABLE)
    logits = np.zeros((1, 101), np.float32)
    for limit in (102, -1):
        with pytest.raises(NativeError, match="a draw from ids outside the vocabulary"):
            model.draw(logits, [Draw(1.0, 1.0, 0.0, 0, 0, 0, 0, limit)])
    nothing = model.draw(logits, [Draw(1.0, 1.0, 0.0, 0, 0, 0, 0, 0)])
    assert nothing.statuses == [DrawStatus.NOTHING]
    model.close()


def test_what_does_not_fit_is_refused() -> None:
    model = open_model(101, Variant.PORTABLE)
    logits, fair = np.zeros((1, 101), np.float32), Draw(1.0, 1.0, 0.0, 0, 0, 0, 0, 101)
    short = Edits(masks=[mask_of([1], 96)])
    for wrong, complaint in (
        (fair._replace(given=101), "a draw from ids outside the vocabulary"),
        (fair._replace(tops=MAX_LOGPROBS + 1), "more logprobs than are told"),
        (fair._replace(edits=short), "a mask has 3 words of uint32 for 101 ids"),
    ):
        with pytest.raises(NativeError, match=complaint):
            model.draw(logits, [wrong])
    model.close()


def test_edits_are_those_of_the_time_of_the_draw() -> None:
    """A leg goes on to count its tokens: the arrays of one step may have moved by the next."""
    model = open_model(101, Variant.PORTABLE)
    logits = np.linspace(0, 1, 101, dtype=np.float32)[None]
    edits = Edits(presence=2.0)
    drawing = Drawing([Draw(0.0, 1.0, 0.0, 0, 0, 0, 0, 101, edits=edits)])
    for token in range(100, 0, -1):
        model.draw_again(logits, drawing)
        assert drawing.tokens == [token]
        edits.known.extend((token, 1))
    model.close()


@functools.cache
def small_models() -> list[NativeModel]:
    return [open_model(70, variant, threads=1) for variant in LIBRARY.variants]


IDS = st.integers(-2, 75)
MEASURES = st.floats(-1e39, 1e39) | st.sampled_from([0.0, -0.0, 0.1, 1.0, -2.0])


@st.composite
def any_edits(draw: st.DrawFn) -> Edits:
    known = draw(st.dictionaries(IDS, st.integers(0, 9)))
    bias = draw(st.dictionaries(IDS, MEASURES))
    return Edits(
        repetition=draw(st.floats(1e-3, 1e3)),
        presence=draw(MEASURES),
        frequency=draw(MEASURES),
        known=array("i", [number for pair in known.items() for number in pair]),
        biased=array("i", bias),
        bias=array("d", bias.values()),
        masks=draw(st.lists(st.lists(IDS).map(lambda ids: mask_of(ids, 70)), max_size=2)),
    )


@given(
    st.lists(st.floats(width=32), min_size=70, max_size=70),
    any_edits(),
    st.lists(IDS, max_size=3),
    st.none() | st.integers(0, MAX_LOGPROBS),
)
def test_any_edits_leave_the_likeliest_id_that_the_reference_finds(
    logits: list[float], edits: Edits, banned: list[int], logprobs: int | None
) -> None:
    how = SamplingParams(temperature=0.0, logprobs=logprobs)
    row = PlannedRow("a", [], 0, [], True, how, banned=tuple(banned), edits=edits)
    values = np.array([logits], np.float32)
    wanted = StepResult(0)
    draw_tokens([(row, values)], 69, wanted)
    for model in small_models():
        result = StepResult(0)
        drawn_tokens([row], model.draw(values, [native_draw(row, 69)]), 69, result)
        assert (result.sampled, result.failed) == (wanted.sampled, wanted.failed)
        check_logprobs(result.logprobs, wanted.logprobs)
