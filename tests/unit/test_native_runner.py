"""The native runner beside the reference: the same tokens, and L1 for each variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.native import open_library
from tests.tinymodel import write_tiny_model
from tests.unit.test_runner_invariance import (
    FAMILIES,
    POOL_BLOCKS,
    give_blocks,
    kv_bits,
    requests,
    run_alone,
    run_together,
)
from tests.unit.test_weights import change

from kvrelay.kernels.native.binding import NativeError, Variant
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.native_runner import NativeRunner, load_native_runner
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.runner import RunnerSettings, load_runner
from kvrelay.shared.kv.layout import DType, KVLayout
from kvrelay.shared.model.native import NativeKernels
from kvrelay.shared.model.reader import EMBEDDING
from kvrelay.shared.types import SamplingParams

LIBRARY = open_library()
GREEDY = SamplingParams(temperature=0.0)


def make_cache(folder: Path, dtype: DType, block_size: int) -> KVCache:
    """A pool that holds NaN wherever nothing was written."""
    config = read_config(resolve_model(str(folder)))
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, dtype)
    cache = KVCache(layout, POOL_BLOCKS * 16 // block_size)
    cache.tensor.fill_(torch.nan)
    return cache


def native(folder: Path, cache: KVCache, variant: Variant, threads: int) -> NativeRunner:
    source = resolve_model(str(folder))
    config = read_config(source)
    settings = RunnerSettings(1, max_model_len=1024, vocab_limit=config.vocab)
    kernels = NativeKernels(LIBRARY, variant, threads)
    return load_native_runner(source, config, cache, kernels, settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", LIBRARY.variants)
def test_tokens_and_kv_are_those_of_the_request_alone(
    tmp_path: Path, variant: Variant, family: str, dtype: DType
) -> None:
    folder = write_tiny_model(tmp_path, family=family, **FAMILIES[family])
    lonely, busy = requests(), requests()
    expected = []
    for request in lonely:
        runner = native(folder, make_cache(folder, dtype, 16), variant, threads=2)
        give_blocks([request], iter(range(POOL_BLOCKS)), 16)
        run_alone(runner, request)  # type: ignore[arg-type]
        expected.append(kv_bits(runner, request))  # type: ignore[arg-type]
        runner.model.close()

    runner = native(folder, make_cache(folder, dtype, 8), variant, threads=3)
    shuffled = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    give_blocks(busy, iter(shuffled), 8)
    run_together(runner, busy)  # type: ignore[arg-type]

    assert {r.key: r.tokens for r in busy} == {r.key: r.tokens for r in lonely}
    for request, bits in zip(busy, expected, strict=True):
        assert torch.equal(kv_bits(runner, request), bits), request.key  # type: ignore[arg-type]
    runner.model.close()


PROMPT = [8 * at % 500 + 1 for at in range(257)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32_are_those_of_the_reference(tmp_path: Path, family: str) -> None:
    check_logits(write_tiny_model(tmp_path, family=family, **FAMILIES[family]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("differs", [True, False])
def test_a_head_that_is_the_embedding_again_is_held_once_and_another_is_the_head(
    tmp_path: Path, differs: bool, tied: bool
) -> None:
    folder = write_tiny_model(tmp_path, tied=tied)
    table = load_file(folder / "model.safetensors")[EMBEDDING]
    change(folder, lm_head__weight=table.flip(0) if differs else table)
    check_logits(folder)
    runner = native(folder, make_cache(folder, "float32", 16), LIBRARY.variants[-1], threads=2)
    assert runner.model.shape.tied == (not differs)
    runner.model.close()


def check_logits(folder: Path) -> None:
    """Every variant's are those of the reference."""
    source = resolve_model(str(folder))
    config = read_config(source)
    settings = RunnerSettings(1, 1024, config.vocab)
    reference = load_runner(source, config, make_cache(folder, "float32", 16), settings)
    blocks = list(range(20))
    plan = Plan(0, (PlannedRow("a", PROMPT, 0, blocks, False, GREEDY),))
    expected = reference.logits(plan)
    for variant in LIBRARY.variants:
        runner = native(folder, make_cache(folder, "float32", 16), variant, threads=2)
        got = torch.from_numpy(runner.logits(plan))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert runner.progress == config.layers
        runner.model.close()


def test_copies_happen_before_the_step_and_progress_counts_layers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    runner = native(folder, make_cache(folder, "float32", 16), LIBRARY.variants[-1], threads=2)

    def row(key: str, tokens: list[int], block: int, start: int = 0) -> PlannedRow:
        return PlannedRow(key, tokens, start, [block], key != "quiet", GREEDY)

    assert runner.run(Plan(0, (row("quiet", [5, 6, 7], 2),))).sampled == {}
    forked = Plan(1, (row("b", [8], 4, start=3), row("a", [9], 2, start=3)), copies=((2, 4),))
    together = runner.run(forked).sampled
    assert together["b"] == runner.run(Plan(2, (row("c", [5, 6, 7, 8], 0),))).sampled["c"]
    assert together["a"] == runner.run(Plan(3, (row("d", [5, 6, 7, 9], 1),))).sampled["d"]
    assert (runner.progress, runner.run(Plan(4, ())).sampled) == (8, {})
    with pytest.raises(NativeError, match="a token id outside the vocabulary"):
        runner.run(Plan(5, (row("e", [512], 0),)))
    bad = row("f", [5], 7, start=3)  # positions 0 to 2 were never written
    assert list(runner.run(Plan(6, (bad,))).failed) == ["f"]
    runner.model.close()
