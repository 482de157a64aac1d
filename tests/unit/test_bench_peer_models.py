"""The peers' copies of a model hold the same numbers, rounded once, and the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tinymodel import write_tiny_model
from tests.unit.test_weights import NAMES

from kvrelay.services.bench.errors import BenchError
from kvrelay.services.bench.peer_models import peer_model, write_bf16_gguf
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import ModelSource, resolve_model
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer

Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF of a tiny qwen2 (whose rows GGUF keeps in order), matrices in Q8_0."""
    folder = write_tiny_model(tmp_path_factory.mktemp("peer") / "tiny", family="qwen2")
    config = json.loads((folder / "config.json").read_text())
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    file = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(bpe["vocab"], key=lambda token: bpe["vocab"][token]))
    writer.add_token_types([3] * 3 + [1] * (len(bpe["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind = name.removeprefix("model.layers.").rpartition(".")
        number, _, part = stem.partition(".")
        in_layer = name.startswith("model.layers.")
        stored = f"blk.{number}.{NAMES[part]}" if in_layer else NAMES[stem]
        values = tensor.numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(f"{stored}.{kind}", gguf.quants.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(f"{stored}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stored(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a GGUF, in float32."""
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


def test_the_folder_is_the_same_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    folder = peer_model("vllm", resolve_model(str(tiny)))
    assert folder == tmp_path / "peers/models/tiny"
    ours, theirs = read_config(resolve_model(str(tiny))), read_config(resolve_model(str(folder)))
    assert theirs.tied_head is True
    for name in ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert (theirs.rope_theta, theirs.eos_token_ids) == (ours.rope_theta, ours.eos_token_ids)
    values = stored(tiny)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(values)
    for name, gguf_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert torch.equal(tensors[name], values[gguf_name].bfloat16()), name
    text = "The quick brown fox<|im_end|>, 42"
    assert load_tokenizer(folder).encode(text, False) == load_tokenizer(tiny).encode(text, False)


def test_the_other_gguf_has_the_same_numbers_in_bfloat16(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "as-bf16.gguf"
    write_bf16_gguf(tiny, target)
    values, rounded = stored(tiny), stored(target)
    assert list(rounded) == list(values)
    for name, value in values.items():
        kept = value if value.ndim == 1 else value.bfloat16().float()
        assert torch.equal(rounded[name], kept), name
    kinds = {t.tensor_type.name for t in gguf.GGUFReader(target).tensors if len(t.shape) == 2}
    assert kinds == {"BF16"}
    assert read_config(resolve_model(str(target))) == read_config(resolve_model(str(tiny)))
    assert load_tokenizer(target).identity == load_tokenizer(tiny).identity


def test_a_folder_serves_vllm_as_it_is_and_llamacpp_not_at_all(tmp_path: Path) -> None:
    source = ModelSource("folder", tmp_path)
    assert peer_model("vllm", source) == tmp_path
    with pytest.raises(BenchError, match=r"^peer: llamacpp needs a model in a GGUF file, and "):
        peer_model("llamacpp", source)


def test_what_failed_to_be_written_is_written_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    written: list[Path] = []

    def failing(file: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        written.append(target)
        raise OSError("disk full")

    write: Callable[[Path, Path], None] = failing
    monkeypatch.setattr("kvrelay.services.bench.peer_models.write_folder", write)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            peer_model("vllm", resolve_model(str(tiny)))
    assert len(written) == 2
    assert not (tmp_path / "peers/models/tiny").exists()
