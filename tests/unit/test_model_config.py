"""Reading configurations and finding models: exact values, and one-line errors with the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tinymodel import write_tiny_model

from kvrelay.shared.checkpoint.config import ModelConfig, RopeScaling, read_config
from kvrelay.shared.checkpoint.source import ModelSource, resolve_model, weights_id
from kvrelay.shared.errors import ModelError


def config_of(folder: Path, **fields: object) -> ModelConfig:
    return read_config(resolve_model(str(write_tiny_model(folder, **fields))))


def test_every_field_of_a_folder(tmp_path: Path) -> None:
    assert config_of(tmp_path, family="mistral", sliding_window=48, tied=False) == ModelConfig(
        family="mistral",
        layers=2,
        hidden=64,
        intermediate=176,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=512,
        max_positions=2048,
        rms_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        sliding_window=48,
        qkv_bias=False,
        qk_norm=False,
        tied_head=False,
        eos_token_ids=(2, 0),
    )


def test_families_differ_in_bias_and_norm(tmp_path: Path) -> None:
    qwen2 = config_of(tmp_path / "a", family="qwen2", sliding_window=4096)
    qwen3 = config_of(tmp_path / "b", family="qwen3")
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}},
    ],
    ids=["rope_scaling", "rope_parameters"],
)
def test_llama3_scaling_in_the_old_and_the_new_place(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    config = config_of(tmp_path, **fields)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500_000.0


def test_an_end_is_refused_in_either_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, eos_token_id=[0, 1 << 40])
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"/config\.json: eos_token_id must .*'\[0, 1099511627776"):
        read_config(source)
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2147483648}')
    with pytest.raises(ModelError, match=r"/generation_config\.json: eos_token_id .*'2147483648'"):
        read_config(source)


def test_eos_ids_come_from_generation_config_and_else_from_config(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, eos_token_id=[7, 8])
    source = resolve_model(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(source).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(source).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma"}, "model family 'gemma' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn' is not supported"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types = .* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = 'set' is not supported"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, not '0'"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"eos_token_id": -1}, r"eos_token_id must be a whole number below 2\^31 or a list of"),
        ({"eos_token_id": [0, 1 << 31]}, r"eos_token_id must be a whole number below 2\^31 or a"),
        ({"model_type": 3}, "model_type must be a string"),
    ],
)
def test_what_would_run_wrong_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=message) as error:
        read_config(ModelSource("folder", tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_file_is_named(tmp_path: Path, text: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json is not"):
        read_config(ModelSource("folder", tmp_path))


def test_models_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("no model")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "/no/such/model": "there is no model at /no/such/model",
        "./gone.gguf": "there is no model at gone.gguf",
        str(tmp_path / "notes.gguf"): "is neither a model folder nor a GGUF file",
        str(tmp_path / "empty"): r"cannot read .*config\.json: No such file",
        "not a model id": "'not a model id' is neither a path nor a model id of the hub",
    }.items():
        with pytest.raises(ModelError, match=message) as error:
            resolve_model(name)
        assert "\n" not in str(error.value)


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'nobody/none' is no path here, and the hub") as error:
        resolve_model("nobody/none")
    assert "\n" not in str(error.value)


def test_weights_id_follows_contents_and_not_the_place(tmp_path: Path) -> None:
    one, two, three = (
        resolve_model(str(write_tiny_model(tmp_path / name, seed=seed)))
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    )
    assert weights_id(one) == weights_id(two)
    assert weights_id(one) != weights_id(three)
    assert len(weights_id(one)) == 64
