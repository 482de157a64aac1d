"""How much the prefix cache finds: against ideals, on a recorded hour of chat, turn by turn."""

from __future__ import annotations

import lzma
import random
from collections import OrderedDict
from pathlib import Path

from tests.sim.desk import Desk, desk
from tests.sim.model import BLOCK, VOCAB, reference

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import LegRef, LegSpec, SamplingParams

TRACE = Path(__file__).parent.parent / "data" / "mooncake_conversation_ids.txt.xz"
ROWS = 4000
SIZE = 2
"""Tokens of a block in the replay: a block of the trace is one of ours."""


def recorded() -> list[list[int]]:
    rows = lzma.decompress(TRACE.read_bytes()).decode().splitlines()[:ROWS]
    spans = [[span.partition("-") for span in row.split()] for row in rows]
    return [[i for a, _, b in row for i in range(int(a), int(b or a) + 1)] for row in spans]


def ideal_hits(rows: list[list[int]], blocks: int) -> int:
    """Of a cache that evicts the least recently used block, one request after the other.

    A request's last block is never a hit: one token is always computed.
    """
    known: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        for block in row[:-1]:
            if block not in known:
                break
            hits += 1
        for block in reversed(row):
            known[block] = None
            known.move_to_end(block)
        while len(known) > blocks:
            known.popitem(last=False)
    return hits


def replayed_hits(rows: list[list[int]], blocks: int) -> int:
    """Of an engine that has eight requests at a time."""
    limits = EngineLimits(SIZE, 8, 4096, blocks * SIZE, 2**31, b"replay")
    engine = Engine(limits, blocks)
    waiting = enumerate(rows)
    hits = 0
    while True:
        for number, row in waiting:
            prompt = tuple(token for block in row for token in (block, block + 1))
            spec = LegSpec(f"{number}", prompt, SamplingParams(max_tokens=1))
            engine.handle(m.Serve("router", LegRef(spec.leg, 0, number), spec, handoff=False))
            if len(engine.state.legs) == 8:
                break
        plan, out = engine.plan(4096)
        hits += sum(it.cached // SIZE for it in out if isinstance(it, m.Started))
        if plan is None:
            assert engine.state.legs == {}
            return hits
        sampled = {row.key: 0 for row in plan.rows if row.sample}
        engine.complete(plan, StepResult(plan.step, sampled))


def test_a_recorded_hour_hits_as_an_ideal_cache_of_the_same_size_would() -> None:
    rows = recorded()
    for blocks in (4_000, 12_000):
        assert replayed_hits(rows, blocks) >= 0.97 * ideal_hits(rows, blocks) > 0


def test_with_memory_enough_a_recorded_hour_hits_as_if_nothing_were_ever_evicted() -> None:
    rows = recorded()
    blocks = sum(len(row) for row in rows)
    assert replayed_hits(rows, blocks) >= ideal_hits(rows, blocks)


def crowd(system_tokens: int) -> tuple[Desk, int]:
    """A hundred requests at once with one system prompt; and how many tokens they have besides."""
    rng = random.Random(1)
    busy = desk(blocks=2000, seqs=64, batched=128)
    system = [rng.randrange(VOCAB) for _ in range(system_tokens)]
    own_tokens = 0
    for number in range(100):
        own = [number, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 11)))]
        own_tokens += len(own)
        busy.submit(LegSpec(f"{number}", (*system, *own), SamplingParams(max_tokens=1)))
    busy.finish()
    return busy, own_tokens


def test_a_hundred_requests_at_once_compute_their_system_prompt_once() -> None:
    busy, own_tokens = crowd(1000)
    assert busy.computed_tokens == 1000 + own_tokens


def test_what_they_share_of_a_block_is_computed_again_at_most() -> None:
    busy, own_tokens = crowd(1002)
    assert 1002 + own_tokens <= busy.computed_tokens <= 1002 + own_tokens + 99 * (1002 % BLOCK)


def test_a_next_turn_computes_what_is_new_and_one_token() -> None:
    rng = random.Random(2)
    chat = desk(blocks=100)
    history: list[int] = []
    for turn in range(10):
        new = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        prompt = [*history, *new]
        before = chat.computed_tokens
        answer_tokens = rng.randint(1, 9)
        chat.submit(LegSpec(f"{turn}", tuple(prompt), SamplingParams(max_tokens=answer_tokens)))
        chat.finish()
        answer = chat.answers[f"{turn}"]
        assert answer == reference(prompt, answer_tokens)
        # The last token of an answer was sampled and not computed: its turn comes in the next.
        unknown = len(new) + (1 if history else 0)
        assert chat.cached[f"{turn}"] == len(prompt) - unknown
        assert chat.computed_tokens - before == unknown + answer_tokens - 1
        history = prompt + answer


def test_decode_finds_prompt_and_answer_of_the_last_turn_in_whole_blocks() -> None:
    """What it lacks for the next turn begins behind them; its last block is relayed again."""
    turns = desk(blocks=40)
    engine = turns.engine
    first, second = LegRef("1", 0, 1), LegRef("2", 0, 2)
    prompt = list(range(10))
    answer = reference(prompt, 9)
    spec = LegSpec("1", tuple(prompt), SamplingParams(max_tokens=9))
    turns.answers["1"] = []
    room = engine.handle(m.Reserve("r", first, spec, "P"))[1]
    assert room == m.Room("r", first, 0, (3,))
    for token in prompt:
        turns.memory.run(
            Plan(0, (PlannedRow("1", (token,), token, (0, 1, 2), False, spec.sampling),))
        )
    turns.note(engine.handle(m.ChunkArrived(first, 0, 10, last=True, token=answer[0])))
    turns.finish()
    assert turns.answers["1"] == answer
    next_turn = LegSpec("2", (*prompt, *answer, 5, 6), SamplingParams())
    room = engine.handle(m.Reserve("r", second, next_turn, "P"))[1]
    assert room == m.Room("r", second, 16, (2,))


def test_two_texts_share_a_block_up_to_the_token_where_they_part() -> None:
    alone = desk(blocks=20)
    alone.submit(LegSpec("a", (1, 2, 3, 4, 5, 6, 7, 8), SamplingParams(max_tokens=1)))
    alone.finish()
    alone.submit(LegSpec("b", (1, 2, 3, 4, 5, 6, 9), SamplingParams(max_tokens=3)))
    alone.finish()
    assert alone.cached["b"] == 6
    assert alone.answers["b"] == reference([1, 2, 3, 4, 5, 6, 9], 3)


def test_another_salt_finds_nothing() -> None:
    alone = desk(blocks=20)
    prompt = tuple(range(10))
    for leg, salt in (("a", "one"), ("b", "two"), ("c", ""), ("d", "one")):
        alone.submit(LegSpec(leg, prompt, SamplingParams(max_tokens=1), cache_salt=salt))
        alone.finish()
    assert alone.cached == {"a": 0, "b": 0, "c": 0, "d": 9}


def test_equal_answers_are_held_once() -> None:
    both = desk(blocks=40)
    for leg in ("a", "b"):
        both.submit(LegSpec(leg, tuple(range(10)), SamplingParams(max_tokens=21)))
    both.finish()
    assert both.answers["a"] == both.answers["b"] == reference(range(10), 21)
    # Ten blocks hold one of them; the other has only its last block to itself.
    assert both.most_used_blocks <= 8 + 2
    assert both.engine.state.pool.counts().cached_idle == 8


def test_a_prompt_whose_computation_was_given_up_is_not_found() -> None:
    hasty = desk(blocks=40, batched=8)
    prompt = tuple(range(30))
    hasty.submit(LegSpec("gone", prompt, SamplingParams()))
    plan, _ = hasty.engine.plan(8)
    assert plan is not None
    hasty.engine.handle(m.OwnerGone("router"))
    hasty.note(hasty.engine.complete(plan, hasty.memory.run(plan)))
    assert hasty.ended == ["gone"]
    hasty.submit(LegSpec("again", prompt, SamplingParams(max_tokens=2)))
    hasty.finish()
    assert hasty.cached["again"] == 0
    assert hasty.answers["again"] == reference(prompt, 2)
