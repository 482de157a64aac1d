"""A checkpoint's tensors go one by one into the native library, which alone keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.native.binding import Library, NativeModel, Shape, Slot, Variant
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.model.load import TORCH_DTYPES, Progress, TensorReader
from kvrelay.shared.model.rope import rope_table
from kvrelay.shared.model.weights import Weights


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Which code computes, and with how many threads."""

    library: Library
    variant: Variant
    threads: int


def load_native(
    weights: Weights,
    config: ModelConfig,
    layout: KVLayout,
    kernels: NativeKernels,
    *,
    positions: int,
    progress: Progress | None = None,
) -> NativeModel:
    """Build the model in the dtype of the layout, with rope for `positions` positions.

    Raises `ModelError` naming the tensor that is missing, misshapen, not finite or not understood,
    and `NativeError` without memory for the weights.
    """
    tied = config.tied_head
    if tied is None:
        tied = "lm_head.weight" not in weights.shapes
    shape = _shape(config, layout, tied)
    model = NativeModel(kernels.library, shape, kernels.variant, kernels.threads)
    reader = TensorReader(weights, TORCH_DTYPES[layout.dtype], progress)
    filler = _Filler(model, reader)
    filler.matrix(Slot.EMBED, 0, "model.embed_tokens.weight", (config.vocab, config.hidden))
    for number in range(config.layers):
        _fill_layer(filler, config, number)
    filler.vector(Slot.NORM, 0, "model.norm.weight", config.hidden)
    if not tied:
        filler.matrix(Slot.HEAD, 0, "lm_head.weight", (config.vocab, config.hidden))
    factors = None
    if "rope_freqs.weight" in weights.shapes:
        factors = reader.tensor("rope_freqs.weight", config.head_dim // 2, dtype=torch.float32)
    reader.finish()
    model.set_rope(rope_table(config, positions, factors).numpy())
    return model


def _shape(config: ModelConfig, layout: KVLayout, tied: bool) -> Shape:
    return Shape(
        layers=config.layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        block_size=layout.block_size,
        window=config.sliding_window or 0,
        dtype=int(layout.dtype == "bfloat16"),
        tied=int(tied),
        qkv_bias=int(config.qkv_bias),
        qk_norm=int(config.qk_norm),
        rms_eps=config.rms_eps,
    )


def _fill_layer(filler: _Filler, config: ModelConfig, number: int) -> None:
    at = f"model.layers.{number}."
    hidden, wide = config.hidden, config.intermediate
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices: Mapping[Slot, tuple[str, int, int]] = {
        Slot.Q: ("self_attn.q_proj", q_rows, hidden),
        Slot.K: ("self_attn.k_proj", kv_rows, hidden),
        Slot.V: ("self_attn.v_proj", kv_rows, hidden),
        Slot.ATTENTION_OUT: ("self_attn.o_proj", hidden, q_rows),
        Slot.GATE: ("mlp.gate_proj", wide, hidden),
        Slot.UP: ("mlp.up_proj", wide, hidden),
        Slot.DOWN: ("mlp.down_proj", hidden, wide),
    }
    vectors = {
        Slot.ATTENTION_NORM: ("input_layernorm.weight", hidden),
        Slot.MLP_NORM: ("post_attention_layernorm.weight", hidden),
    }
    if config.qk_norm:
        vectors[Slot.Q_NORM] = ("self_attn.q_norm.weight", config.head_dim)
        vectors[Slot.K_NORM] = ("self_attn.k_norm.weight", config.head_dim)
    if config.qkv_bias:
        vectors[Slot.Q_BIAS] = ("self_attn.q_proj.bias", q_rows)
        vectors[Slot.K_BIAS] = ("self_attn.k_proj.bias", kv_rows)
        vectors[Slot.V_BIAS] = ("self_attn.v_proj.bias", kv_rows)
    for slot, (name, rows, columns) in matrices.items():
        filler.matrix(slot, number, f"{at}{name}.weight", (rows, columns))
    for slot, (name, width) in vectors.items():
        filler.vector(slot, number, at + name, width)


class _Filler:
    """Reads a tensor, hands it over, and forgets it."""

    def __init__(self, model: NativeModel, reader: TensorReader) -> None:
        self._model = model
        self._reader = reader

    def matrix(self, slot: Slot, layer: int, name: str, shape: tuple[int, int]) -> None:
        self._set(slot, layer, self._reader.tensor(name, *shape), shape)

    def vector(self, slot: Slot, layer: int, name: str, width: int) -> None:
        values = self._reader.tensor(name, width).to(torch.float32)
        self._set(slot, layer, values, (1, width))

    def _set(self, slot: Slot, layer: int, values: Tensor, shape: tuple[int, int]) -> None:
        dense = values.contiguous()
        self._model.set(slot, layer, dense.data_ptr(), shape)
