"""Whatever the model computes, an answer is what its schema says: 200 schemas, random logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tests.schemas import Schema, schemas
from tests.tinymodel import write_tiny_model

from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.constrained import ConstrainedRunner
from kvrelay.shared.engine.draws import draw_tokens
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import Machine
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.engine.record.lines import Header
from kvrelay.shared.engine.record.recorded import RecordedEngine
from kvrelay.shared.engine.record.replay import replay
from kvrelay.shared.engine.record.writer import RecordWriter
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.grammar.compile import serialize
from kvrelay.shared.grammar.store import grammar_store
from kvrelay.shared.types import (
    EndReason,
    FinishReason,
    GrammarKind,
    LegRef,
    LegSpec,
    SamplingParams,
)

LONGEST = 2000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerInfo:
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


class RandomModel:
    """A runner without a model: logits are noise, in which what closes comes up more and more."""

    progress = 0

    def __init__(self, tokenizer: TokenizerInfo) -> None:
        self._vocab = tokenizer.vocab_size
        closing = {b'"', b"}", b"]", b'"}', b'"]', b"}}", b"]}"}
        self._closers = [
            id for id in range(self._vocab) if tokenizer.token_bytes(id).strip() in closing
        ]
        self._closers += tokenizer.special.eos_token_ids

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        result = StepResult(plan.step)
        rows = [(row, [self._logits(row)]) for row in plan.rows if row.sample]
        draw_tokens(rows, self._vocab, result)
        return result

    def _logits(self, row: PlannedRow) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        rng = np.random.default_rng([*row.key.encode(), row.index])
        logits = rng.standard_normal(self._vocab).astype(np.float32) * 3
        logits[self._closers] += min(row.index * 0.1, 20.0)
        return logits


LIMITS = EngineLimits(16, 64, 512, 4096, 512, b"t")


def answers(
    tokenizer: TokenizerInfo,
    asked: Sequence[SamplingParams],
    machine: Callable[[Engine], Machine] = lambda engine: engine,
) -> list[tuple[tuple[int, ...], FinishReason]]:
    """By leg, each computed by an engine beside all others: its tokens, and how it ended."""
    grammars = grammar_store(tokenizer, tokenizer.vocab_size)
    runner = ConstrainedRunner(RandomModel(tokenizer), grammars)
    engine = machine(Engine(LIMITS, 4096))
    out: list[m.Instruction] = []
    for number, sampling in enumerate(asked):
        ref = LegRef(f"r/{number}", 0, number)
        if sampling.grammar:
            grammars.open(ref.key, sampling.grammar, ())
        spec = LegSpec(ref.leg, (5, 6), sampling, eos_token_ids=tokenizer.special.eos_token_ids)
        out += engine.handle(m.Serve("owner", ref, spec, handoff=False))
    while True:
        plan, planned = engine.plan(512)
        out += planned
        if plan is None:
            break
        out += engine.complete(plan, runner.run(plan))
    engine.state.check()
    tokens: list[list[int]] = [[] for _ in asked]
    ends: dict[int, FinishReason] = {}
    for item in out:
        if isinstance(item, m.TokenOut):
            tokens[item.ref.nonce].append(item.token)
            if item.finish is not None:
                ends[item.ref.nonce] = item.finish
        elif isinstance(item, m.Ended):
            assert item.reason is EndReason.FINISHED, (asked[item.ref.nonce].grammar, item.message)
    return [(tuple(said), ends[number]) for number, said in enumerate(tokens)]


def text_of(tokenizer: TokenizerInfo, tokens: Sequence[int]) -> str:
    """Strict: a character that is cut in two would raise."""
    ends = tokenizer.special.eos_token_ids
    return b"".join(tokenizer.token_bytes(id) for id in tokens if id not in ends).decode()


def grammar_of(schema: Schema) -> str:
    return serialize(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
def test_every_schema_gives_valid_documents(tokenizer: TokenizerInfo, temperature: float) -> None:
    wanted = schemas()
    base = SamplingParams(temperature=temperature, seed=7, max_tokens=LONGEST)
    asked = [replace(base, grammar=grammar_of(schema)) for schema in wanted]
    found = answers(tokenizer, asked)
    for schema, (tokens, finish) in zip(wanted, found, strict=True):
        text = text_of(tokenizer, tokens)
        assert finish is FinishReason.STOP, (schema, text[:300])
        checker = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        checker.validate(json.loads(text))
    assert len(found) == 200


def test_a_limit_cuts_a_document_off_and_says_so(tokenizer: TokenizerInfo) -> None:
    grammar = grammar_of({"type": "array", "items": {"type": "integer"}, "minItems": 50})
    whole = SamplingParams(temperature=0.0, max_tokens=LONGEST, grammar=grammar)
    [(tokens, finish)] = answers(tokenizer, [whole])
    assert finish is FinishReason.STOP and len(tokens) > 50
    [cut] = answers(tokenizer, [replace(whole, max_tokens=20)])
    assert cut == (tokens[:20], FinishReason.LENGTH)


def test_neighbours_change_nothing(tokenizer: TokenizerInfo) -> None:
    """L1: and legs without a grammar are as if nobody had one."""
    free = SamplingParams(seed=3, max_tokens=40)
    held = replace(free, grammar=grammar_of({"type": "object"}), max_tokens=LONGEST)
    [alone] = answers(tokenizer, [free])
    assert answers(tokenizer, [free, held, held])[0] == alone


def test_a_recorded_life_is_lived_again_without_grammars(
    tokenizer: TokenizerInfo, tmp_path: Path
) -> None:
    path = tmp_path / "life.jsonl"
    writer = RecordWriter(path, Header(LIMITS, 4096, "w", "test"), 1 << 20)
    sampling = SamplingParams(max_tokens=LONGEST, grammar=grammar_of({"enum": [12, "x"]}))
    [(_, finish)] = answers(
        tokenizer, [sampling], lambda engine: RecordedEngine(engine, writer.note)
    )
    writer.close()
    assert finish is FinishReason.STOP
    assert not replay(path).engine.state.legs, "it ends where it ended"
