"""Loading: every tensor present and right, GGUF equal to the folder it came from, damage named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tinymodel import VOCAB, write_tiny_model
from torch import Tensor

from kvrelay.kernels.linear.reference import linear
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import ModelSource, resolve_model
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.llama import Llama
from kvrelay.shared.model.load import load_llama
from kvrelay.shared.model.reader import EMBEDDING, TensorReader
from kvrelay.shared.model.safetensors_index import read_index
from kvrelay.shared.model.weights import open_weights

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(path: Path, progress: Callable[[int, int], None] | None = None) -> Llama:
    source = resolve_model(str(path))
    config = read_config(source)
    weights = open_weights(source, config)
    return load_llama(weights, config, "float32", positions=64, progress=progress)


def answer(model: Llama) -> Tensor:
    """Logits of a few tokens under an attention that just mixes values, enough to tell weights."""
    tokens = torch.arange(20) * 7

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        weight = (q * k.repeat_interleave(repeat, 1)).sum(-1, keepdim=True).tanh()
        return weight * v.repeat_interleave(repeat, 1)

    return model.logits(model.forward(tokens, attend))


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: gguf.GGMLQuantizationType,
    arch: str,
    kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
) -> Path:
    """The folder's model in GGUF form, as llama.cpp's converter writes it. `kinds` are those of
    matrices that differ, by their names in the file."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind_of = name.removeprefix("model.layers.").rpartition(".")
        number, _, part = stem.partition(".")
        layer = f"blk.{number}." if name.startswith("model.layers.") else ""
        stored = NAMES[part if layer else stem]
        values = tensor.numpy()
        if arch == "llama" and stored in heads:
            values = values.reshape(heads[stored], 2, -1, values.shape[1]).swapaxes(1, 2)
            values = values.reshape(tensor.shape)
        quantise, named = values.ndim == 2, f"{layer}{stored}.{kind_of}"
        block = kinds.get(named, kind)
        writer.add_tensor(
            named,
            gguf.quants.quantize(np.ascontiguousarray(values), block) if quantise else values,
            raw_dtype=block if quantise else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_gives_the_logits_of_the_folder_it_was_made_of(
    tmp_path: Path, arch: str, tied: bool
) -> None:
    folder = write_tiny_model(tmp_path / "folder", family=arch, tied=tied)
    file = write_gguf(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.F32, arch=arch)
    ours, theirs = load(file), load(folder)
    assert torch.equal(answer(ours), answer(theirs))
    assert ours.config.eos_token_ids == (2, 0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_blocks_are_what_the_library_dequantises(tmp_path: Path, kind: str) -> None:
    fields: dict[str, object] = {"intermediate_size": 192}
    folder = write_tiny_model(tmp_path / "folder", family="qwen2", **fields)
    block = gguf.GGMLQuantizationType[kind]
    file = write_gguf(folder, tmp_path / "m.gguf", kind=block, arch="qwen2")
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if tensor.dim() == 2:
            blocks = gguf.quants.quantize(tensor.numpy(), block)
            stored[name] = torch.from_numpy(gguf.quants.dequantize(blocks, block).copy())
    save_file(stored, folder / "model.safetensors")
    assert torch.equal(answer(load(file)), answer(load(folder)))


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"rope_freqs.weight": torch.full((8,), 4.0)}, folder / "model.safetensors")
    linear_scaled = write_tiny_model(
        tmp_path / "linear", rope_scaling={"rope_type": "linear", "factor": 4.0}
    )
    assert torch.equal(load(folder).rope, load(linear_scaled).rope)


def test_a_sharded_folder_is_the_whole_model_and_progress_reaches_the_end(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", tied=False)
    sharded = write_tiny_model(tmp_path / "sharded", tied=False)
    shard(sharded)
    seen: list[tuple[int, int]] = []
    model = load(sharded, lambda done, total: seen.append((done, total)))
    assert torch.equal(answer(model), answer(load(whole)))
    done = [at for at, _ in seen]
    assert done == sorted(done)
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(tensor.nbytes for tensor in load_file(whole / "model.safetensors").values())
    )


def shard(folder: Path) -> None:
    """Split model.safetensors over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors (None removes one); `__` in a name stands for a dot."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, "has no tensor model.norm.weight"),
        (
            {"model__norm__weight": torch.ones(65)},
            r"model.norm.weight has the shape \[65\], not \[64\]",
        ),
        (
            {"model__norm__weight": torch.full((64,), torch.nan)},
            "model.norm.weight holds numbers that are not finite",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.ones(64)},
            "a tensor this model has no use for: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            {"model__norm__weight": torch.ones(64, dtype=torch.int32)},
            "model.norm.weight has the type I32, which is not supported",
        ),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    tmp_path: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    change(write_tiny_model(tmp_path), **tensors)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_second_copy_of_a_tied_head_is_held_once(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    expected = answer(load(folder))
    change(folder, lm_head__weight=load_file(folder / "model.safetensors")[EMBEDDING].clone())
    model = load(folder)
    assert torch.equal(answer(model), expected)
    source = resolve_model(str(folder))
    reader = TensorReader(open_weights(source, read_config(source)), "float32", None)
    assert reader.shares_head(True)


def test_a_head_that_is_not_the_embedding_is_the_head_whatever_is_declared(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    tied = answer(load(folder))
    head = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(9)) / 8
    change(folder, lm_head__weight=head)
    declared_tied = answer(load(folder))
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(answer(load(folder)), declared_tied)
    assert not torch.equal(declared_tied, tied)
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, lm_head__weight=head[:3])
    with pytest.raises(ModelError, match=r"lm_head\.weight has the shape \[3, 64\]"):
        load(folder)


@pytest.mark.parametrize(("table", "head"), [("F32", "F32"), ("BF16", "F32"), ("Q8_0", "Q8_0")])
def test_a_gguf_that_holds_the_embedding_as_head_again_holds_it_once(
    tmp_path: Path, table: str, head: str
) -> None:
    folder = write_tiny_model(tmp_path / "folder", intermediate_size=192)
    stored = load_file(folder / "model.safetensors")[EMBEDDING].bfloat16().float()
    change(folder, model__embed_tokens__weight=stored, lm_head__weight=stored.clone())
    kind = gguf.GGMLQuantizationType[table]
    other = {"output.weight": gguf.GGMLQuantizationType[head]}
    file = write_gguf(folder, tmp_path / "m.gguf", kind=kind, arch="llama", kinds=other)
    config = read_config(ModelSource("gguf", file))
    reader = TensorReader(open_weights(ModelSource("gguf", file), config), "float32", None)
    assert reader.shares_head(config.tied_head)
    model = load(file)
    assert torch.equal(linear(torch.eye(64), model.head).T, model.embed)


@pytest.mark.parametrize("at", [0, VOCAB * 64 - 1])
def test_one_number_makes_another_head(tmp_path: Path, at: int) -> None:
    head = load_file(write_tiny_model(tmp_path) / "model.safetensors")[EMBEDDING].clone()
    head.view(-1)[at] += 1.0
    change(tmp_path, lm_head__weight=head)
    assert torch.equal(linear(torch.eye(64), load(tmp_path).head).T, head)


def test_an_index_that_is_wrong_about_a_tensor_is_refused(tmp_path: Path) -> None:
    shard(write_tiny_model(tmp_path))
    file = tmp_path / "model.safetensors.index.json"
    shards = json.loads(file.read_text())["weight_map"]
    other = {name: f"model-{1 - int(at[6])}.safetensors" for name, at in shards.items()}
    file.write_text(json.dumps({"weight_map": other}))
    with pytest.raises(ModelError, match=r"safetensors holds .*, by the index of another file"):
        load(tmp_path)
    file.write_text(json.dumps({"weight_map": shards | {"model.more": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-1\.safetensors does not hold model\.more"):
        load(tmp_path)


def test_an_index_that_leaves_a_tensor_out_is_refused_unless_nothing_reads_it(
    tmp_path: Path,
) -> None:
    change(write_tiny_model(tmp_path), model__rotary_emb__inv_freq=torch.ones(8))
    shard(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    shards = json.loads(file.read_text())["weight_map"]
    del shards["model.rotary_emb.inv_freq"]
    file.write_text(json.dumps({"weight_map": shards}))
    load(tmp_path)
    at = shards.pop("model.norm.weight")
    file.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(
        ModelError, match=rf"{at} holds model\.norm\.weight, which the index leaves"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {}}', r"index\.json names no tensor"),
        ('{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}', "'a' stands in it twice"),
    ],
)
def test_an_index_names_tensors_and_each_once(tmp_path: Path, text: str, message: str) -> None:
    (write_tiny_model(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


def with_header(file: Path, edit: Callable[[str], str]) -> None:
    """Edit the header of a safetensors file as text."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = edit(data[8 : 8 + size].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def moved(header: str) -> str:
    """One tensor lies where another of its size does, and leaves a hole."""
    places: dict[str, dict[str, object]] = json.loads(header)
    first, other = (f"model.layers.{n}.input_layernorm.weight" for n in (0, 1))
    places[first]["data_offsets"] = places[other]["data_offsets"]
    return json.dumps(places)


def twice(header: str) -> str:
    norm = json.dumps(json.loads(header)["model.norm.weight"])
    return header.rstrip().removesuffix("}") + f', "model.norm.weight": {norm}}}'


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (moved, "begins at byte [0-9]+ of the data, not at"),
        (twice, "'model.norm.weight' stands in"),
    ],
)
def test_tensors_that_do_not_tile_their_file_are_refused(
    tmp_path: Path, edit: Callable[[str], str], message: str
) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    load(tmp_path)
    with_header(file, lambda header: header + " " * 5)  # the format pads with blanks
    load(tmp_path)
    with_header(file, edit)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("second", [[20, 36], [12, 28], [0, 16]])
def test_a_hole_or_an_overlap_is_named_with_its_numbers(tmp_path: Path, second: list[int]) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes() + b"1234")
    with_header(file, lambda header: header.replace("[16,32]", str(second)))
    message = (
        rf"m\.safetensors is .* damaged .*'b' begins at byte {second[0]} of the data, not at 16"
    )
    with pytest.raises(ModelError, match=message):
        read_index(file)


def test_tensors_may_be_named_in_any_order_and_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    tensors = {"b": torch.arange(4.0), "a": torch.zeros(0, 3), "c": torch.tensor(2.0)}
    save_file(tensors, file, metadata={"format": "pt"})
    with_header(file, lambda header: json.dumps(dict(reversed(json.loads(header).items()))))
    found = {tensor.name: (tensor.shape, tensor.data.tobytes()) for tensor in read_index(file)}
    assert found == {n: (tuple(t.shape), t.numpy().tobytes()) for n, t in tensors.items()}
    save_file({}, file)
    assert read_index(file) == ()


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 1000)
    with pytest.raises(ModelError, match=r"1000 bytes follow the last tensor"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_tiny_model(tmp_path))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model-1\.safetensors: No such file"):
        resolve_model(str(tmp_path))


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    index = {"weight_map": {"a": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names '\.\./other\.safetensors'"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("kept_bytes", [0, 7, 100, 5000, -1])
def test_a_cut_off_safetensors_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0.0001, 0.01, 0.04, 0.3, 0.9999])
def test_a_cut_off_gguf_is_named(tmp_path: Path, kept: float) -> None:
    folder = write_tiny_model(tmp_path / "folder")
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(
        write_tiny_model(folder, intermediate_size=192),
        tmp_path / "m.gguf",
        kind=kind,
        arch="llama",
    )
    config = read_config(ModelSource("gguf", file))
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_weights(ModelSource("gguf", file), config)


def test_compute_in_bfloat16_rounds_each_weight_once(tmp_path: Path) -> None:
    source = resolve_model(str(write_tiny_model(tmp_path)))
    config = read_config(source)
    model = load_llama(open_weights(source, config), config, "bfloat16", positions=64)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    unit = torch.eye(64, dtype=torch.bfloat16)
    assert torch.equal(linear(unit, model.layers[0].attention_out).T, stored.bfloat16())
