"""What an engine's legs do to their draws, and what is told of them: counts, bans, whose prompt."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.unit.test_engine import engine, kinds, ref

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.engine.steering import steering_of
from kvrelay.shared.types import EndReason, LegSpec, Logprobs, SamplingParams

PROMPT = (5, 6, 5, 7)


def leg(name: str = "a", prompt: tuple[int, ...] = PROMPT, **how: object) -> LegSpec:
    return LegSpec(name, prompt, SamplingParams(temperature=0, **{"max_tokens": 9, **how}))  # type: ignore[arg-type]


def told_of(token: int) -> Logprobs:
    return Logprobs(-float(token), 1)


def result_of(plan: Plan, token: int) -> StepResult:
    """As a runner gives it: all that the rows ask for."""
    result = StepResult(plan.step)
    for row in plan.rows:
        if row.told:
            result.prompt_logprobs[row.key] = [told_of(each) for each in row.told]
        if row.sample:
            result.sampled[row.key] = token
            if row.sampling.logprobs is not None:
                result.logprobs[row.key] = told_of(token)
    return result


def step(e: Engine, token: int = 9, budget: int = 8) -> tuple[tuple[PlannedRow, ...], list[object]]:
    plan, out = e.plan(budget)
    assert plan is not None
    said: list[object] = [*out, *e.complete(plan, result_of(plan, token))]
    e.state.check()
    return plan.rows, said


def test_who_asks_for_nothing_has_no_steering() -> None:
    assert steering_of(leg(min_tokens=3, logprobs=2, top_k=5), 100) is None
    e = engine()
    e.handle(m.Serve("r", ref("a"), leg(), handoff=False))
    (row,), _ = step(e)
    assert (row.edits, row.banned, row.told) == (None, (), ())


def test_penalties_count_the_prompt_for_repetition_alone() -> None:
    answer = [5, 8, 8]
    repetition = steering_of(leg(repetition_penalty=1.5), 100)
    presence = steering_of(leg(presence_penalty=0.5), 100)
    assert repetition is not None and presence is not None
    edits = repetition.edits([*PROMPT, *answer])
    assert edits is not None and edits.repetition == 1.5
    assert edits.known.tolist() == [5, 1, 6, 0, 7, 0, 8, 2]
    edits = presence.edits([*PROMPT, *answer])
    assert edits is not None and edits.known.tolist() == [5, 1, 8, 2]


def test_tokens_are_counted_as_they_come_as_if_all_had_come_at_once() -> None:
    rng = random.Random(1)
    known = rng.choices(range(12), k=40)
    spec = leg(prompt=tuple(known[:8]), repetition_penalty=2.0, frequency_penalty=0.1)
    growing = steering_of(spec, 12)
    assert growing is not None
    for end in range(8, 41):
        anew = steering_of(spec, 12)
        assert anew is not None
        pairs = []
        for steering in (growing, anew):
            edits = steering.edits(known[:end])
            assert edits is not None
            flat = edits.known.tolist()
            pairs.append(dict(zip(flat[::2], flat[1::2], strict=True)))
        counted = Counter(known[8:end])
        assert pairs[0] == pairs[1] == {token: counted[token] for token in known[:end]}


@pytest.mark.parametrize(
    ("words", "answer", "banned"),
    [
        (((4,),), [], (4,)),
        (((7, 3),), [], (3,)),
        (((5, 7, 3), (6, 7, 2)), [], (3,)),
        (((5, 7, 3),), [1], ()),
        (((7, 1, 2),), [1], (2,)),
        (((5, 6, 5, 7, 8),), [], (8,)),
        (((1, 5, 6, 5, 7, 8),), [], ()),
        (((4,), (7, 3)), [7], (4, 3)),
    ],
)
def test_the_last_id_of_a_bad_word_is_banned_behind_the_others(
    words: tuple[tuple[int, ...], ...], answer: list[int], banned: tuple[int, ...]
) -> None:
    """Also where these begin in the prompt."""
    steering = steering_of(leg(bad_words=words), 100)
    assert steering is not None
    assert steering.banned([*PROMPT, *answer]) == banned
    assert steering.edits([*PROMPT, *answer]) is None


def test_allowed_ids_are_one_mask_for_all_steps() -> None:
    steering = steering_of(leg(allowed_token_ids=(0, 33, 70, 99)), 70)
    assert steering is not None
    edits = steering.edits(PROMPT)
    assert edits is not None
    (mask,) = edits.masks
    assert mask.tolist() == [1, 2, 0]
    assert steering.edits([*PROMPT, 1]) is edits and edits.masks[0] is mask


def test_a_continuation_is_steered_as_the_leg_would_have_been() -> None:
    how = {"presence_penalty": 1.0, "bad_words": ((9, 9, 9),)}
    e = engine()
    e.handle(m.Serve("r", ref("a"), leg(**how), handoff=False))
    step(e)
    step(e)
    plan, _ = e.plan(8)
    assert plan is not None
    again = engine()
    spec = LegSpec("a", PROMPT, leg(**how).sampling, seen=(9, 9))
    again.handle(m.Serve("r", ref("a", 1), spec, handoff=False))
    continued, _ = again.plan(8)
    assert continued is not None
    rows = plan.rows[0], continued.rows[0]
    assert [row.banned for row in rows] == [(9,), (9,)]
    edits = [row.edits for row in rows]
    assert [each.known.tolist() for each in edits if each] == [[9, 2], [9, 2]]


# ---- logprobs ---------------------------------------------------------------------------------


def outs(said: list[object]) -> list[m.TokenOut]:
    return [item for item in said if isinstance(item, m.TokenOut)]


def test_logprobs_leave_with_their_tokens_and_those_of_the_prompt_with_the_first() -> None:
    e = engine()
    prompt = tuple(range(10, 20))
    e.handle(m.Serve("r", ref("a"), leg(prompt=prompt, logprobs=0, prompt_logprobs=0), False))
    (row,), said = step(e)
    assert (list(row.told), outs(said)) == ([*range(11, 19)], [])
    (row,), said = step(e)
    assert list(row.told) == [19]
    told = tuple(told_of(token) for token in prompt[1:])
    assert outs(said) == [m.TokenOut("r", ref("a"), 0, 9, None, told_of(9), told)]
    (row,), said = step(e)
    assert (list(row.told), outs(said)) == (
        [],
        [m.TokenOut("r", ref("a"), 1, 9, None, told_of(9))],
    )


def test_whose_prompt_is_told_reads_no_cache_and_waits_for_nobody() -> None:
    e = engine()
    prompt = tuple(range(10, 22))
    e.handle(m.Serve("r", ref("a"), leg("a", prompt), False))
    step(e)
    e.handle(m.Serve("r", ref("b"), leg("b", prompt, prompt_logprobs=0), False))
    e.handle(m.Serve("r", ref("c"), leg("c", prompt), False))
    rows, said = step(e, budget=8)
    assert {row.key: row.start for row in rows} == {"a#0": 8, "b#0": 0}, "c waits for a"
    for _ in range(4):
        rows, more = step(e)
        said += more
    started = {it.ref.leg: it.cached for it in said if isinstance(it, m.Started)}
    assert started == {"b": 0, "c": 11}
    firsts = {it.ref.leg: it.prompt_logprobs for it in outs(said) if it.index == 0}
    assert firsts == {"a": (), "b": tuple(map(told_of, prompt[1:])), "c": ()}
    assert e.state.pool.counts().in_use == 3 + 3, "equal blocks are held once, all the same"


def test_a_continuation_and_decode_do_not_tell_the_prompt_again() -> None:
    e = engine()
    how = leg(prompt_logprobs=0, logprobs=0).sampling
    e.handle(m.Serve("r", ref("a", 1), LegSpec("a", PROMPT, how, seen=(9,)), handoff=False))
    (row,), said = step(e)
    assert list(row.told) == []
    assert outs(said) == [m.TokenOut("r", ref("a", 1), 1, 9, None, told_of(9))]

    decode = engine()
    decode.handle(m.Reserve("r", ref("b"), leg("b", prompt_logprobs=0, logprobs=0), "P"))
    out = decode.handle(m.ChunkArrived(ref("b"), 0, 4, last=True, token=5))
    assert out[-1] == m.TokenOut("r", ref("b"), 0, 5, None), "it repeats the token alone"


def test_prefill_tells_before_it_hands_over() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), leg(prompt_logprobs=0, logprobs=0), handoff=True))
    e.plan(8)
    e.handle(m.RoomGranted(ref("a"), 0, (1,)))
    _, said = step(e)
    told = tuple(map(told_of, PROMPT[1:]))
    assert said[1] == m.TokenOut("r", ref("a"), 0, 9, None, told_of(9), told)
    assert kinds(said) == ["Started", "TokenOut", "Push"]


def test_a_prompt_whose_memory_was_taken_is_told_from_its_beginning() -> None:
    e = engine(blocks=13)
    e.handle(m.Serve("r", ref("old"), leg("old", (1, 2, 3, 4), max_tokens=30), False))
    for _ in range(8):
        step(e)
    long = tuple(range(100, 134))
    e.handle(m.Serve("r", ref("new"), leg("new", long, prompt_logprobs=0), False))
    said: list[object] = []
    while e.state.legs:
        said += step(e, budget=2)[1]
    assert e.state.preemptions == 1
    [first] = [it for it in outs(said) if it.ref == ref("new") and it.index == 0]
    assert first.prompt_logprobs == tuple(map(told_of, long[1:]))


def test_more_logprobs_than_are_told_are_refused() -> None:
    e = engine()
    for name, count in (("logprobs", 21), ("prompt_logprobs", 21)):
        out = e.handle(m.Serve("r", ref(name), leg(name, **{name: count}), handoff=False))
        why = f"{name}: {count} are not from 0 to 20"
        assert out == [m.Ended("r", ref(name), EndReason.FAILED, why)]
