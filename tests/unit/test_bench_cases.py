"""What a benchmark measures: cases by name, prompts by seed, bytes and FLOPs by shape."""

from __future__ import annotations

import pytest

from kvrelay.services.bench.cases import CASES, Work, case_work, chosen, step_work
from kvrelay.services.bench.errors import BenchError
from kvrelay.services.bench.measure import steps_of
from kvrelay.shared.checkpoint.config import ModelConfig

SMOLLM = ModelConfig(
    family="llama",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    max_positions=8192,
    rms_eps=1e-5,
    rope_theta=100_000.0,
    rope_scaling=None,
    sliding_window=None,
    qkv_bias=False,
    qk_norm=False,
    tied_head=True,
    eos_token_ids=(0, 2),
)
NAMED = {case.name: case for case in CASES}


def test_the_cases_are_those_of_the_report() -> None:
    names = ["prefill_512", "prefill_2048", *(f"decode_b{n}" for n in (1, 4, 8, 16, 32))]
    assert [case.name for case in chosen(())] == names


def test_chosen_cases_keep_their_order_and_an_unknown_one_is_named() -> None:
    some = chosen(("decode_b8", "prefill_512"))
    assert [case.name for case in some] == ["prefill_512", "decode_b8"]
    with pytest.raises(BenchError, match=r"^cases: decode_b7 is not one of prefill_512, "):
        chosen(("decode_b7",))


def test_prompts_depend_on_the_seed_alone_and_hold_no_end_token() -> None:
    case = NAMED["decode_b4"]
    prompts = case.prompts(SMOLLM, "1 2")
    assert prompts == case.prompts(SMOLLM, "1 2")
    assert [len(prompt) for prompt in prompts] == [128] * 4
    assert len({tuple(prompt[:16]) for prompt in prompts + case.prompts(SMOLLM, "1 3")}) == 8
    tokens = {token for prompt in prompts for token in prompt}
    assert max(tokens) < 49152
    assert not tokens & {0, 2}


def test_a_decode_step_reads_each_weight_once_and_the_keys_and_values_of_its_rows() -> None:
    layer = 576 * (9 + 2 * 3 + 9) * 64 + 3 * 576 * 1536
    weights = 30 * layer + 576 * 49152
    assert weights == 134_479_872
    eight = step_work(SMOLLM, 2, [(160, 1)] * 8)
    assert eight.weight_bytes == 2 * weights
    assert eight.kv_bytes == 8 * 30 * 2 * 3 * 64 * 2 * 161
    assert eight.flops == 8 * (2 * weights + 4 * 30 * 9 * 64 * 161)
    assert case_work(NAMED["decode_b8"], SMOLLM, 2, 256) == eight


def test_a_prompt_reads_the_weights_once_per_chunk_and_attends_to_what_is_before() -> None:
    work = case_work(NAMED["prefill_512"], SMOLLM, 2, 256)
    first, second = step_work(SMOLLM, 2, [(0, 256)]), step_work(SMOLLM, 2, [(256, 256)])
    assert work == first + second
    assert work.weight_bytes == 2 * 2 * 134_479_872
    pairs = 512 * 513 // 2
    assert first.flops + second.flops == (
        2 * (512 * (134_479_872 - 576 * 49152) + 2 * 576 * 49152) + 4 * 30 * 9 * 64 * pairs
    )
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)


def test_steps_are_counted_by_shape() -> None:
    assert steps_of(NAMED["decode_b4"], 256) == {((1, 1, 1, 1), True): 1}
    assert steps_of(NAMED["prefill_2048"], 256) == {((256,), False): 7, ((256,), True): 1}
    assert steps_of(NAMED["prefill_512"], 200) == {((200,), False): 2, ((112,), True): 1}
