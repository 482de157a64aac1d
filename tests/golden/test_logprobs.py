"""Logprobs of prompt and answer are those of `transformers` in float32 on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.prompts import prompts
from tests.golden.test_oracle import BLOCK_SIZE, Oracle, oracle, pytestmark
from tests.stack import running

from kvrelay.shared.checkpoint.fetch import default_model_path
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.types import Logprobs, SamplingParams

__all__ = ["oracle", "pytestmark"]

TOLERANCE = 1e-3
TOPS = 20
HOW = SamplingParams(temperature=0.0, logprobs=TOPS, prompt_logprobs=TOPS)
CHUNK = 128


def ours(oracle: Oracle, ids: list[int]) -> tuple[int, list[Logprobs]]:
    """The next token, and what is told of all tokens but the first."""
    blocks = range(-(-len(ids) // BLOCK_SIZE))
    told: list[Logprobs] = []
    for start in range(0, len(ids), CHUNK):
        chunk, after = ids[start : start + CHUNK], ids[start + 1 : start + CHUNK + 1]
        last = start + CHUNK >= len(ids)
        row = PlannedRow("a", chunk, start, blocks, last, HOW, told=after)
        result = oracle.ours.run(Plan(0, (row,)))
        told += result.prompt_logprobs.get("a", [])
    return result.sampled["a"], [*told, result.logprobs["a"]]


@pytest.mark.timeout(400)
def test_logprobs_and_ranks_are_within_a_thousandth_of_those_of_transformers(
    oracle: Oracle,
) -> None:
    chosen = [prompt for prompt in prompts() if prompt.tokens is None or prompt.tokens < 300]
    positions = 0
    for prompt in chosen[::12]:
        ids = oracle.encode(prompt)
        token, told = ours(oracle, ids)
        with torch.inference_mode():
            logits = oracle.theirs(torch.tensor([ids]), use_cache=False).logits[0]
        exact = logits.double().log_softmax(dim=-1)
        for row, token_id, mine in zip(exact, [*ids[1:], token], told, strict=True):
            check(row, token_id, mine)
        positions += len(told)
    assert positions > 300


def check(exact: torch.Tensor, token: int, mine: Logprobs) -> None:
    assert mine.chosen == pytest.approx(float(exact[token]), abs=TOLERANCE)
    # Within the tolerance two ids may rightly change places.
    surely = int((exact > exact[token] + 2 * TOLERANCE).sum())
    perhaps = int((exact > exact[token] - 2 * TOLERANCE).sum())
    assert surely < mine.rank <= perhaps
    best = exact.topk(TOPS).values
    for (top, logprob), value in zip(mine.top, best.tolist(), strict=True):
        assert logprob == pytest.approx(value, abs=TOLERANCE)
        assert logprob == pytest.approx(float(exact[top]), abs=TOLERANCE)


@pytest.mark.timeout(400)
def test_completions_tell_them_over_http_split(oracle: Oracle, tmp_path: Path) -> None:
    chosen = [prompt for prompt in prompts() if prompt.tokens is None or prompt.tokens < 300]
    with running(tmp_path / "stack", default_model_path(), dtype="float32") as stack:
        for prompt in chosen[::19][:5]:
            ids = oracle.encode(prompt)
            answer = stack.complete(
                ids, temperature=0, max_tokens=8, echo=True, logprobs=TOPS, return_token_ids=True
            )
            (choice,) = answer["choices"]
            known = ids + choice["token_ids"]
            with torch.inference_mode():
                logits = oracle.theirs(torch.tensor([known]), use_cache=False).logits[0]
            told(logits.double().log_softmax(dim=-1), known, choice["logprobs"])


def told(exact: torch.Tensor, ids: list[int], logprobs: dict[str, Any]) -> None:
    """The first token has nothing before it, so that nothing is told of it."""
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(ids)
    for row, token, chosen, top in zip(
        exact,
        ids[1:],
        logprobs["token_logprobs"][1:],
        logprobs["top_logprobs"][1:],
        strict=False,  # what would come behind the last one is told nowhere
    ):
        assert chosen == pytest.approx(float(row[token]), abs=TOLERANCE)
        best = row.topk(len(top)).values.tolist()
        assert sorted(top.values(), reverse=True)[:5] == pytest.approx(best[:5], abs=TOLERANCE)
