"""The runner as an executor of plans, and the pool's memory as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tinymodel import write_tiny_model

from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.runner import RunnerSettings, TorchRunner, load_runner
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.sampling.sampler import Draw, sample
from kvrelay.shared.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def make_runner(folder: Path, *, block_size: int = 16, vocab_limit: int = 512) -> TorchRunner:
    source = resolve_model(str(write_tiny_model(folder)))
    config = read_config(source)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, "float32")
    settings = RunnerSettings(threads=1, max_model_len=256, vocab_limit=vocab_limit)
    return load_runner(source, config, KVCache(layout, 8), settings)


def row(key: str, tokens: list[int], blocks: list[int], **fields: object) -> PlannedRow:
    settings: dict[str, object] = {"start": 0, "sample": True, "sampling": GREEDY, **fields}
    return PlannedRow(key=key, tokens=tokens, blocks=blocks, **settings)  # type: ignore[arg-type]


def test_only_rows_that_ask_are_sampled_and_progress_counts_layers(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    rows = (row("a", [1, 2, 3], [0], sample=False), row("b", [4], [1]))
    result = runner.run(Plan(7, rows))
    assert (result.step, set(result.sampled), runner.progress) == (7, {"b"}, 2)
    assert runner.run(Plan(8, ())).sampled == {}


def test_banned_ids_and_padding_of_the_vocabulary_are_not_sampled(tmp_path: Path) -> None:
    runner = make_runner(tmp_path / "a")
    best = runner.run(Plan(0, (row("a", [9, 8], [0]),))).sampled["a"]
    second = runner.run(Plan(0, (row("a", [9, 8], [0], banned=(best,)),))).sampled["a"]
    assert second != best
    logits = runner.logits(Plan(0, (row("a", [9, 8], [0]),)))[-1]
    assert logits.topk(2).indices.tolist() == [best, second]
    padded = make_runner(tmp_path / "b", vocab_limit=best)
    expected = int(logits[:best].argmax())
    assert padded.run(Plan(0, (row("a", [9, 8], [0]),))).sampled["a"] == expected


def test_the_noise_is_that_of_choice_and_index(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    params = SamplingParams(seed=11)
    rows = tuple(
        row(f"{choice}.{index}", [9, 8], [choice], sampling=params, choice=choice, index=index)
        for choice in range(4)
        for index in range(3)
    )
    logits = runner.logits(Plan(0, (row("a", [9, 8], [0]),)))[-1].numpy()
    expected = {
        planned.key: sample(logits, params, Draw(planned.choice, planned.index)) for planned in rows
    }
    assert runner.run(Plan(0, rows)).sampled == expected
    assert len(set(expected.values())) > 6


def test_copies_happen_before_the_step(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.cache.tensor.fill_(torch.nan)
    runner.run(Plan(0, (row("a", [5, 6, 7], [2], sample=False),)))
    forked = Plan(1, (row("b", [8], [4], start=3), row("a", [9], [2], start=3)), copies=((2, 4),))
    together = runner.run(forked).sampled
    assert together["b"] == runner.run(Plan(2, (row("c", [5, 6, 7, 8], [0]),))).sampled["c"]
    assert together["a"] == runner.run(Plan(3, (row("d", [5, 6, 7, 9], [1]),))).sampled["d"]


def test_logits_that_are_no_numbers_never_become_a_token(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.cache.tensor.fill_(torch.nan)
    good = row("b", [5, 6], [1])
    alone = runner.run(Plan(0, (good,))).sampled
    bad = row("a", [5], [2], start=3)  # positions 0 to 2 were never written
    result = runner.run(Plan(1, (bad, good)))
    assert result.sampled == alone and list(result.failed) == ["a"]


def test_a_block_size_the_kernels_cannot_do_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size: 24 tokens, but it must divide 128"):
        make_runner(tmp_path, block_size=24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_view_is_the_memory_of_whole_blocks(dtype: str) -> None:
    layout = KVLayout(2, 1, 4, 16, dtype)  # type: ignore[arg-type]
    cache = KVCache(layout, 5)
    cache.tensor.zero_()
    view = cache.view(1, 2)
    assert (view.nbytes, view.readonly, view.contiguous) == (2 * layout.block_bytes, False, True)
    cache.tensor[2] = 1.5
    assert bytes(view[: layout.block_bytes]) == bytes(layout.block_bytes)
    assert bytes(view[layout.block_bytes :]) == cache.view(2, 1).tobytes()
    view[: layout.block_bytes] = view[layout.block_bytes :]
    assert torch.equal(cache.tensor[1], cache.tensor[2])
    assert float(cache.tensor[[0, 3, 4]].abs().sum()) == 0.0


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (4, 2), (5, 1)])
def test_a_view_outside_the_pool_is_an_error(first: int, count: int) -> None:
    with pytest.raises(IndexError, match="of 5"):
        KVCache(KVLayout(1, 1, 4, 16, "float32"), 5).view(first, count)
