"""The measured model in the form that each peer reads, in bfloat16, written once into the cache.

`python -m kvrelay.services.bench.peer_models vllm|llamacpp [MODEL]` writes one ahead of a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import save_file

from kvrelay.services.bench.errors import BenchError
from kvrelay.shared.checkpoint.config import ModelConfig, read_config
from kvrelay.shared.checkpoint.fetch import cache_dir, default_model_path
from kvrelay.shared.checkpoint.gguf_metadata import read_gguf_metadata
from kvrelay.shared.checkpoint.gguf_tokenizer import build_gguf_tokenizer
from kvrelay.shared.checkpoint.source import ModelSource, resolve_model
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer
from kvrelay.shared.model.weights import Weights, open_weights

_MOSTLY_BF16 = 32
"""`general.file_type` of llama.cpp (llama.h, `LLAMA_FTYPE_MOSTLY_BF16`)."""


def peer_model(peer: str, source: ModelSource) -> Path:
    """The model for vllm (a folder) or llamacpp (a file), written now if it is not there yet.

    Raises `BenchError` for a model that this peer cannot get.
    """
    if peer == "vllm":
        if source.kind != "gguf":
            return source.path
        return _once(cache_dir() / "peers/models" / source.path.stem, source, write_folder)
    if source.kind != "gguf":
        raise BenchError(f"peer: llamacpp needs a model in a GGUF file, and {source.path} is none")
    name = f"{source.path.stem}.as-bf16.gguf"
    return _once(cache_dir() / "peers/models" / name, source, write_bf16_gguf)


def _once(path: Path, source: ModelSource, write: Callable[[Path, Path], None]) -> Path:
    if not path.exists():
        part = path.with_name(path.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        write(source.path, part)
        part.rename(path)
    return path


def write_folder(file: Path, folder: Path) -> None:
    """A GGUF file as a Hugging Face folder: config, bfloat16 safetensors, tokenizer."""
    folder.mkdir(exist_ok=True)
    source = ModelSource("gguf", file)
    config = read_config(source)
    weights = open_weights(source, config)
    if "rope_freqs.weight" in weights.shapes:
        raise BenchError(f"model: {file} scales rope by a tensor, which a folder has no place for")
    tensors = {name: _bfloat16(weights, name) for name in weights.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", folder_config(config, tied="lm_head.weight" not in tensors))
    _write_json(folder / "generation_config.json", {"eos_token_id": list(config.eos_token_ids)})
    _write_tokenizer(file, folder)


def _bfloat16(weights: Weights, name: str) -> torch.Tensor:
    whole = np.concatenate(list(weights.pieces(name)))
    return torch.from_numpy(whole).reshape(weights.shapes[name]).to(torch.bfloat16)


def folder_config(config: ModelConfig, *, tied: bool) -> dict[str, object]:
    """What config.json says of a model that came without one."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope = {**rope, "rope_type": "linear", "factor": config.rope_scaling.factor}
    return {
        "model_type": config.family,
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": "bfloat16",
    }


def _write_tokenizer(file: Path, folder: Path) -> None:
    tokenizer, _ = build_gguf_tokenizer(read_gguf_metadata(file), file)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = load_tokenizer(file).special
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.bos_token,
        "eos_token": special.eos_token,
        "chat_template": special.chat_template,
    }
    _write_json(folder / "tokenizer_config.json", {k: v for k, v in names.items() if v})


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_bf16_gguf(file: Path, target: Path) -> None:
    """The same file with every matrix in bfloat16: same names, same order of rows."""
    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    written = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name in written or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=items)
    writer.add_file_type(_MOSTLY_BF16)
    for tensor in reader.tensors:
        floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if floats.ndim == 1:
            writer.add_tensor(tensor.name, floats)
            continue
        packed = gguf.quants.quantize(floats, GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(peer: str, model: str = "") -> None:
    path = peer_model(peer, resolve_model(model or str(default_model_path())))
    sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
