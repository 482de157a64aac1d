"""The decoder of Llama, SmolLM2, Mistral, Qwen2 and Qwen3: one model, whose families differ in

- Qwen2: the query, key and value projections have a bias (in `Layer.qkv`);
- Qwen3: queries and keys are normed head by head before they are rotated (`q_norm`, `k_norm`);
- Mistral: a sliding window, which is the business of the injected attention.

Where keys and values live is not known here: `Attend` takes them and gives back the mix of values.
Shapes: T tokens of a step (of any number of requests), E model width, Hq/Hk heads of width D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.kernels.embedding.reference import embedding
from kvrelay.kernels.linear.reference import PackedLinear, linear
from kvrelay.kernels.rms_norm.reference import rms_norm
from kvrelay.kernels.silu_mul.reference import silu_mul
from kvrelay.shared.checkpoint.config import ModelConfig


class Attend(Protocol):
    """Rotates, stores keys and values, and attends: q [T, Hq, D], k and v [T, Hk, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, Hq, D] float32. Called once per layer, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Projections that read the same input are one matrix."""

    attention_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class Llama:
    """A loaded model, in one compute dtype."""

    config: ModelConfig
    embed: Tensor
    """[V, E]"""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: PackedLinear
    rope: Tensor
    """[P, 2, D/2] float32, see `rope_table`."""

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] int64 -> hidden states [T, E] after the last layer."""
        x = embedding(token_ids, self.embed)
        for number, layer in enumerate(self.layers):
            x = x + self._attention(number, layer, x, attend)
            x = x + self._mlp(layer, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> [R, V] float32."""
        normed = rms_norm(hidden, self.norm, self.config.rms_eps)
        return linear(normed, self.head).to(torch.float32)

    def _attention(self, number: int, layer: Layer, x: Tensor, attend: Attend) -> Tensor:
        config = self.config
        qkv = linear(rms_norm(x, layer.attention_norm, config.rms_eps), layer.qkv)
        heads = qkv.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = heads.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_eps)
            k = rms_norm(k, layer.k_norm, config.rms_eps)
        mixed = attend(number, q, k, v).flatten(1)  # [T, Hq * D]
        return linear(mixed.to(x.dtype), layer.attention_out)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate_up = linear(rms_norm(x, layer.mlp_norm, self.config.rms_eps), layer.gate_up)
        return linear(silu_mul(gate_up), layer.down)
