"""Masks are a function of grammar and tokens: regexes, choices, grammars, ends, cut characters."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest
from tests.tinymodel import write_tiny_model

from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.engine.constrained import DEAR_MASK_S, ConstrainedRunner
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.compile import serialize
from kvrelay.shared.grammar.matcher import Matcher
from kvrelay.shared.grammar.store import KEPT, GrammarStore, grammar_store
from kvrelay.shared.sampling.edits import Edits
from kvrelay.shared.types import GrammarKind, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerInfo:
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def store(tokenizer: TokenizerInfo) -> GrammarStore:
    return grammar_store(tokenizer, tokenizer.vocab_size)


def opened(store: GrammarStore, grammar: str, seen: Sequence[int] = ()) -> Matcher:
    store.open("k", grammar, seen)
    matcher = store.get("k")
    assert matcher is not None
    return matcher


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]


def walk(matcher: Matcher, tokenizer: TokenizerInfo, seed: int) -> list[int]:
    """Ids drawn evenly from what is allowed until nothing is left, or an end is drawn."""
    rng = np.random.default_rng(seed)
    said: list[int] = []
    while not matcher.complete:
        said.append(int(rng.choice(allowed(matcher))))
        matcher.advance(said[-1:])
    return said


def text_of(tokenizer: TokenizerInfo, ids: Sequence[int]) -> str:
    ends = tokenizer.special.eos_token_ids
    return b"".join(tokenizer.token_bytes(id) for id in ids if id not in ends).decode()


NUMBERED = [f"c{number}" for number in range(4096)]
FORMS: list[tuple[GrammarKind, str, Callable[[str], object]]] = [
    (GrammarKind.REGEX, r"[a-f]{2}/\d{1,3}", re.compile(r"[a-f]{2}/\d{1,3}").fullmatch),
    (GrammarKind.REGEX, "(été|冬|🍂)+!", re.compile("(été|冬|🍂)+!").fullmatch),
    (GrammarKind.REGEX, 'a\nb|"c"', ("a\nb", '"c"').__contains__),
    (GrammarKind.CHOICE, json.dumps(["y", "yes", "ye", "ñ\n"]), ["y", "yes", "ye", "ñ\n"].count),
    (GrammarKind.CHOICE, json.dumps(["🧑‍🚀", "🧑"]), ["🧑‍🚀", "🧑"].count),
    (GrammarKind.CHOICE, json.dumps(["", "a/b", "[x]"]), ["", "a/b", "[x]"].count),
    (GrammarKind.CHOICE, json.dumps(NUMBERED), NUMBERED.count),
    (GrammarKind.GRAMMAR, 'start: "(" start ")" | "x"', re.compile(r"\(*x\)*").fullmatch),
    (GrammarKind.GRAMMAR, 'root ::= [0-9] ("+" [0-9])*', re.compile(r"\d(\+\d)*").fullmatch),
]


@pytest.mark.parametrize(("kind", "text", "right"), FORMS, ids=lambda value: str(value)[:20])
def test_forms(
    store: GrammarStore,
    tokenizer: TokenizerInfo,
    kind: GrammarKind,
    text: str,
    right: Callable[[str], object],
) -> None:
    found = set()
    for seed in range(20):
        said = walk(opened(store, serialize(kind, text)), tokenizer, seed)
        found.add(text_of(tokenizer, said))
    assert all(right(answer) for answer in found) and len(found) > 1, found


def test_an_end_is_allowed_exactly_where_the_grammar_accepts(
    store: GrammarStore, tokenizer: TokenizerInfo
) -> None:
    ends = set(tokenizer.special.eos_token_ids)
    matcher = opened(store, serialize(GrammarKind.REGEX, "ab*"))
    [a], [b] = tokenizer.encode("a", False), tokenizer.encode("b", False)
    assert not ends & {*allowed(matcher)}
    matcher.advance([a])
    assert ends < {*allowed(matcher)} and b in allowed(matcher) and not matcher.complete
    matcher.advance([min(ends)])
    assert matcher.complete
    exact = opened(store, serialize(GrammarKind.REGEX, "ab"))
    exact.advance([a])
    assert not ends & {*allowed(exact)}
    exact.advance([b])
    assert exact.complete and {*allowed(exact)} == ends


def test_no_control_token_is_ever_allowed(store: GrammarStore, tokenizer: TokenizerInfo) -> None:
    ends = set(tokenizer.special.eos_token_ids)
    for text in (r"(.|\n)*", r"<\|im_start\|>"):
        matcher = opened(store, serialize(GrammarKind.REGEX, text))
        assert not (tokenizer.special_ids - ends) & {*allowed(matcher)}


def test_whoever_has_the_same_tokens_has_the_same_masks(
    store: GrammarStore, tokenizer: TokenizerInfo
) -> None:
    """A continuation replays what was seen, at any point, also between bytes of a character."""
    grammar = serialize(GrammarKind.REGEX, "(é|冬|🍂|[a-z]+ ){4,8}")
    said = walk(opened(store, grammar), tokenizer, 1)
    first = opened(store, grammar)
    for count in range(len(said)):
        again = opened(store, grammar, said[:count])
        assert (again.mask() == first.mask()).all() and again.complete == first.complete
        first.advance(said[count : count + 1])


def test_tokens_that_the_grammar_forbids_are_an_error(
    store: GrammarStore, tokenizer: TokenizerInfo
) -> None:
    grammar = serialize(GrammarKind.REGEX, "ab")
    wrong = tokenizer.encode("b", False)
    with pytest.raises(BadGrammar, match="grammar"):
        opened(store, grammar, wrong)
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(BadGrammar, match="vocabulary"):
            opened(store, grammar, [outside])
    with pytest.raises(BadGrammar, match="unclosed"):
        opened(store, '{"grammars":[{"lark_grammar":"start: /[/"}]}')


def test_compiled_grammars_that_are_kept_are_bounded(store: GrammarStore) -> None:
    for number in range(KEPT + 5):
        store.open(str(number), serialize(GrammarKind.REGEX, f"a{number}"), ())
        store.close(str(number))
    assert len(store._compiled) == KEPT and not store._matchers


class Greedy:
    """Draws the lowest id that the masks leave, if possible none of `never`."""

    progress = 0

    def __init__(self, never: Collection[int] = ()) -> None:
        self._never = never
        self.edits: list[Edits | None] = []

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        result = StepResult(plan.step)
        for row in plan.rows:
            if row.sample:
                self.edits.append(row.edits)
                bits = np.unpackbits(
                    row.edits.masks[-1].view(np.uint8) if row.edits else np.ones(1, np.uint8),
                    bitorder="little",
                )
                ids = [int(id) for id in np.flatnonzero(bits)]
                result.sampled[row.key] = [*(id for id in ids if id not in self._never), *ids][0]
        return result


def row(key: str, tokens: Sequence[int], index: int, grammar: str = "g") -> PlannedRow:
    return PlannedRow(key, tokens, 0, [0], True, SamplingParams(grammar=grammar), index=index)


def test_rows_are_masked_and_followed(store: GrammarStore, tokenizer: TokenizerInfo) -> None:
    grammar = serialize(GrammarKind.REGEX, "[d-f]{3}")
    [f] = tokenizer.encode("f", False)
    inner = Greedy()
    runner = ConstrainedRunner(inner, store)
    store.open("here", grammar, ())
    store.open("relayed", grammar, ())  # its token 0 was drawn elsewhere
    rows = (row("here", [5, 6], 0), row("free", [9], 0, ""), row("relayed", [f], 1))
    said: dict[str, list[int]] = {"here": [], "free": [], "relayed": [f]}
    complete: set[str] = set()
    for step in range(5):
        result = runner.run(Plan(step, rows))
        assert not result.failed
        for key, token in result.sampled.items():
            said[key].append(token)
        complete |= result.complete
        rows = tuple(
            row(key, ids[-1:], len(ids), "" if key == "free" else "g")
            for key, ids in said.items()
            if key not in complete
        )
    assert complete == {"here", "relayed"} and len(said["free"]) == 5
    assert re.fullmatch("[d-f]{3}", text_of(tokenizer, said["here"]))
    assert re.fullmatch("f[d-f]{2}", text_of(tokenizer, said["relayed"]))
    here = inner.edits[0]
    assert here is not None and inner.edits[3] is here, "what does not change is kept"
    assert inner.edits[1] is None


def test_a_row_without_its_grammar_fails_alone(store: GrammarStore) -> None:
    runner = ConstrainedRunner(Greedy(), store)
    store.open("late", serialize(GrammarKind.REGEX, "abc"), ())
    rows = (row("lost", [5], 0), row("late", [5], 7), row("free", [5], 0, ""))
    result = runner.run(Plan(1, rows))
    assert set(result.failed) == {"lost", "late"} and set(result.sampled) == {"free"}
    assert "not compiled" in result.failed["lost"] and "0 tokens of 7" in result.failed["late"]


def test_what_explodes_as_it_grows_is_given_up_and_delays_nobody(
    store: GrammarStore, tokenizer: TokenizerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that is cheap at first, asked for by many at once, beside one that stays so."""
    monkeypatch.setattr("kvrelay.shared.engine.constrained.MASKS_S", 0.02)
    grows = serialize(GrammarKind.GRAMMAR, "start: e\ne: e e | e e e | /[a-z]/")
    runner = ConstrainedRunner(Greedy(tokenizer.special_ids), store)
    many = [f"many{number}" for number in range(32)]
    for key in many:
        store.open(key, grows, ())
    store.open("plain", serialize(GrammarKind.REGEX, "[d-f]{200}"), ())
    last: dict[str, list[int]] = {key: [] for key in (*many, "plain")}
    failed: dict[str, str] = {}
    longest_s = 0.0
    for step in range(100):
        begun_s = time.thread_time()
        rows = [row(key, ids[-1:], step) for key, ids in last.items() if key not in failed]
        result = runner.run(Plan(step, tuple(rows)))
        longest_s = max(longest_s, time.thread_time() - begun_s)
        failed |= result.failed
        for key, token in result.sampled.items():
            last[key].append(token)
        if failed:
            break
    assert longest_s < 2 * (0.02 + 32 * DEAR_MASK_S), f"a step took {longest_s:.2f} s"
    assert "plain" not in failed and len(last["plain"]) == step + 1
    assert any("too long" in why for why in failed.values()), failed
