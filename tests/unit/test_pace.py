"""How much of a prompt a step may hold."""

from __future__ import annotations

import pytest

from kvrelay.shared.engine.pace import APART_MOST_NS, Pace
from kvrelay.shared.worker.health import STALL_NS

MS = 1_000_000


def measured(target_ms: int) -> Pace:
    """0.25 ms per prompt token, 2 ms per stream of a step."""
    pace = Pace(max_tokens=256, floor_tokens=16, target_step_ns=target_ms * MS)
    pace.observe(64, 16 * MS, 16 * MS, outputs_only=False)
    pace.observe(8, 16 * MS, 8 * MS, outputs_only=True)
    return pace


def test_before_anything_was_measured_a_step_holds_what_it_may() -> None:
    assert Pace(256, 16, 50 * MS).budget(8) == 8 + 240


def test_a_chunk_fits_into_what_the_streams_leave_of_the_target() -> None:
    assert measured(50).budget(0) == 192  # 50 ms hold 200 tokens, twelve blocks
    assert measured(50).budget(8) == 8 + 128  # 34 ms hold 136, eight blocks


def test_prompts_get_a_block_even_where_streams_alone_take_longer() -> None:
    assert measured(10).budget(8) == 8 + 16


def test_a_burst_of_prompts_after_a_lone_stream_is_not_computed_by_the_block() -> None:
    """A lone stream's step is mostly fixed cost: 32 streams do not take 32 times as long."""
    pace = Pace(max_tokens=256, floor_tokens=16, target_step_ns=200 * MS)
    pace.observe(64, 16 * MS, 16 * MS, outputs_only=False)
    pace.observe(1, 10 * MS, 10 * MS, outputs_only=True)
    assert pace.budget(32) > 32 + 256


def test_streams_that_ended_leave_their_share_of_a_step() -> None:
    assert measured(50).budget(4) == 4 + 160  # 42 ms hold 168, ten blocks


def test_a_rate_is_that_of_the_last_tokens_however_many_steps_they_took() -> None:
    pace = Pace(max_tokens=256, floor_tokens=16, target_step_ns=MS)
    assert pace.prefill_tokens_per_s == 0.0
    pace.observe_prompts(8, MS)
    assert pace.prefill_tokens_per_s == 0.0, "too few to say anything"
    pace.observe_prompts(64, 64 * MS)
    assert pace.prefill_tokens_per_s == 1000.0
    pace.observe_prompts(192, 96 * MS)
    assert pace.prefill_tokens_per_s == 1600.0, "256 tokens in 160 ms"
    pace.observe_prompts(1024, 256 * MS)
    assert pace.prefill_tokens_per_s == 4000.0, "as much as is remembered"
    pace.observe_prompts(512, 256 * MS)
    assert pace.prefill_tokens_per_s == pytest.approx(1e9 / (0.375 * MS))
    pace.observe_prompts(2048, 512 * MS)
    assert pace.prefill_tokens_per_s == 4000.0


def test_beside_streams_a_prompt_gets_no_more_than_is_set_for_that() -> None:
    pace = Pace(256, 16, 200 * MS, beside_streams=128)
    assert (pace.budget(0), pace.budget(4), pace.budget(200)) == (256, 132, 248)
    pace.observe(64, 16 * MS, 16 * MS, outputs_only=False)
    assert (pace.budget(0), pace.budget(4)) == (800, 132)
    pace.observe(64, 640 * MS, 640 * MS, outputs_only=False)
    assert pace.budget(4) < 132, "what fits is less"


def test_streams_that_share_their_processors_compute_only_a_part_of_the_time() -> None:
    assert measured(200).apart_ns(0.125) == 64 * MS  # steps of 16 ms, half of it at work
    assert measured(200).apart_ns(0.05) == 100 * MS  # and wait for no more than half a chunk
    assert measured(200).apart_ns(1.0) == 0.0
    assert measured(2000).apart_ns(0.02) == APART_MOST_NS < STALL_NS / 2
