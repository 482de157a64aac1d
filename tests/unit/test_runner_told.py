"""What both runners tell of prompts and answers: the same whatever the chunks and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native import open_library
from tests.tinymodel import write_tiny_model
from tests.unit.test_native_runner import make_cache, native
from tests.unit.test_runner_invariance import make_runner

from kvrelay.kernels.native.binding import Variant
from kvrelay.shared.engine.native_runner import NativeRunner
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.engine.runner import TorchRunner
from kvrelay.shared.sampling.logprobs import logprobs_of
from kvrelay.shared.types import Logprobs, SamplingParams

LIBRARY = open_library()
PROMPT = [7 * at % 500 + 1 for at in range(301)]
HOW = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=3)
NEIGHBOUR = SamplingParams(seed=1, presence_penalty=1.0)


def open_runner(folder: Path, kind: Variant | None) -> NativeRunner | TorchRunner:
    """None is the reference."""
    if kind is None:
        return make_runner(folder, "float32", 2, 16)
    return native(folder, make_cache(folder, "float32", 16), kind, threads=2)


def close(runner: NativeRunner | TorchRunner) -> None:
    if isinstance(runner, NativeRunner):
        runner.model.close()


def row(start: int, end: int, blocks: Sequence[int], how: SamplingParams = HOW) -> PlannedRow:
    told = PROMPT[start + 1 : end + 1] if how.prompt_logprobs is not None else []
    last = end == len(PROMPT)
    return PlannedRow("a", PROMPT[start:end], start, blocks, last, how, told=told)


def tell(
    runner: NativeRunner | TorchRunner, ends: Sequence[int], blocks: Sequence[int]
) -> tuple[list[Logprobs], StepResult]:
    """The prompt in chunks that end there, beside a row that draws."""
    told: list[Logprobs] = []
    start = 0
    for end in ends:
        beside = PlannedRow("b", [end], 0, [199], True, NEIGHBOUR)
        result = runner.run(Plan(0, (beside, row(start, end, blocks))))
        told += result.prompt_logprobs.get("a", [])
        start = end
    return told, result


@pytest.mark.parametrize("kind", [None, *LIBRARY.variants])
def test_a_prompt_is_told_by_its_own_logits_whatever_the_chunks(
    tmp_path: Path, kind: Variant | None
) -> None:
    runner = open_runner(write_tiny_model(tmp_path), kind)
    logits = np.asarray(runner.logits(Plan(0, (row(0, 301, range(20)),))))
    whole, last = tell(runner, [301], range(20, 40))
    chunked, again = tell(runner, [1, 2, 130, 131, 300, 301], range(40, 60))
    assert whole == chunked and len(whole) == 300
    assert (last.sampled["a"], last.logprobs["a"]) == (again.sampled["a"], again.logprobs["a"])
    told = [*whole, last.logprobs["a"]]
    for at, token in enumerate([*PROMPT[1:], int(logits[-1].argmax())]):
        check(told[at], logits[at], token, 3 if at < 300 else 20)
    assert last.logprobs.keys() == {"a"}
    close(runner)


def check(told: Logprobs, logits: NDArray[np.float32], token: int, tops: int) -> None:
    exact = logprobs_of(logits, token, tops)
    assert (told.rank, [top[0] for top in told.top]) == (exact.rank, [top[0] for top in exact.top])
    assert told.chosen == pytest.approx(exact.chosen, abs=1e-6)
    assert [top[1] for top in told.top] == pytest.approx([top[1] for top in exact.top], abs=1e-6)


@pytest.mark.parametrize("kind", [None, *LIBRARY.variants])
def test_a_prompt_with_logits_that_are_no_numbers_fails_alone(
    tmp_path: Path, kind: Variant | None
) -> None:
    runner = open_runner(write_tiny_model(tmp_path), kind)
    bad = row(40, 301, range(20))  # positions 0 to 39 were never written
    beside = PlannedRow("b", [5], 0, [30], True, NEIGHBOUR)
    result = runner.run(Plan(0, (bad, beside)))
    assert result.failed == {"a": "the largest of 512 logits is nan, which gives no token"}
    assert result.sampled.keys() == {"b"} and result.prompt_logprobs == {}
    close(runner)
