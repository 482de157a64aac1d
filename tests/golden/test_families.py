"""Logits of every family equal those of `transformers` in float32, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers  # loads its parts when they are named
from safetensors.torch import load_file
from tests.tinymodel import write_tiny_model
from tests.unit.test_weights import change

from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.runner import RunnerSettings, load_runner
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.model.reader import EMBEDDING
from kvrelay.shared.types import SamplingParams

PROMPT = [(13 * at + 5) % 500 for at in range(150)]
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-untied-theta": {"tied": False, "rope_theta": 500_000.0},
    "llama-3.1-scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-linear-scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"sliding_window": 40},
    "mistral-unlimited": {"sliding_window": None},
    "qwen2": {},
    "qwen2-untied": {"tied": False},
    "qwen3": {},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path, family=name.partition("-")[0], **FAMILIES[name]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("differs", [True, False])
def test_a_head_in_the_folder_is_what_transformers_make_of_it(
    differs: bool, tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, tied=tied)
    table = load_file(folder / "model.safetensors")[EMBEDDING]
    change(folder, lm_head__weight=table.flip(0) if differs else table)
    compare(folder)


def compare(folder: Path) -> None:
    """The logits of a prompt that comes in three chunks."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]

    source = resolve_model(str(folder))
    config = read_config(source)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, 16, "float32")
    runner = load_runner(source, config, KVCache(layout, 16), RunnerSettings(2, 1024, config.vocab))
    for start, end in ((0, 70), (70, 149), (149, 150)):
        row = PlannedRow("r", PROMPT[start:end], start, range(10), False, SamplingParams())
        got = runner.logits(Plan(0, (row,)))
        torch.testing.assert_close(got, expected[start:end], rtol=1e-4, atol=1e-4)
