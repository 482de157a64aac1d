"""A checkpoint's tensors become a model: every one present, of the right shape, and used."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.kernels.linear.reference import PackedLinear, pack
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.errors import ModelError
from kvrelay.shared.kv.layout import DType
from kvrelay.shared.model.llama import Layer, Llama
from kvrelay.shared.model.rope import rope_table
from kvrelay.shared.model.weights import Weights

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), the bytes being those of the file."""

TORCH_DTYPES: dict[DType, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_llama(
    weights: Weights,
    config: ModelConfig,
    dtype: DType,
    *,
    positions: int,
    progress: Progress | None = None,
) -> Llama:
    """Build the model in `dtype`, with rope for `positions` positions.

    Raises `ModelError` naming the tensor that is missing, misshapen, not finite or not understood.
    """
    reader = TensorReader(weights, TORCH_DTYPES[dtype], progress)
    embed = reader.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
    layers = tuple(_layer(reader, config, number) for number in range(config.layers))
    norm = reader.tensor("model.norm.weight", config.hidden)
    tied = config.tied_head
    if tied is None:
        tied = "lm_head.weight" not in weights.shapes
    head = pack(embed) if tied else reader.matrix("lm_head.weight", config.vocab, config.hidden)
    factors = None
    if "rope_freqs.weight" in weights.shapes:
        factors = reader.tensor("rope_freqs.weight", config.head_dim // 2, dtype=torch.float32)
    reader.finish()
    rope = rope_table(config, positions, factors)
    return Llama(config, embed, layers, norm, head, rope)


def _layer(reader: TensorReader, config: ModelConfig, number: int) -> Layer:
    at = f"model.layers.{number}."
    hidden, wide = config.hidden, config.intermediate
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = at + "self_attn.", at + "mlp."
    q_norm = k_norm = None
    if config.qk_norm:
        q_norm = reader.tensor(attention + "q_norm.weight", config.head_dim)
        k_norm = reader.tensor(attention + "k_norm.weight", config.head_dim)
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    return Layer(
        attention_norm=reader.tensor(at + "input_layernorm.weight", hidden),
        qkv=reader.joined(attention, rows, hidden, bias=config.qkv_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        attention_out=reader.matrix(attention + "o_proj.weight", hidden, q_rows),
        mlp_norm=reader.tensor(at + "post_attention_layernorm.weight", hidden),
        gate_up=reader.joined(mlp, {"gate_proj": wide, "up_proj": wide}, hidden, bias=False),
        down=reader.matrix(mlp + "down_proj.weight", hidden, wide),
    )


class TensorReader:
    """Reads tensors with a known shape, and knows which were never asked for."""

    def __init__(self, weights: Weights, dtype: torch.dtype, progress: Progress | None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._progress = progress
        self._unread = set(weights.shapes)
        self._done_bytes = 0
        self._all_bytes = sum(weights.stored_bytes.values())

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in the compute dtype (or the one given)."""
        stored = self._weights.shapes.get(name)
        if stored is None:
            raise ModelError(f"{self._weights.where} has no tensor {name}")
        if stored != shape:
            raise ModelError(
                f"{self._weights.where}: {name} has the shape {list(stored)}, not {list(shape)}"
            )
        values = self._weights.read(name).to(dtype or self._dtype)
        if not all(math.isfinite(end) for end in torch.aminmax(values)):
            raise ModelError(f"{self._weights.where}: {name} holds numbers that are not finite")
        self._unread.discard(name)
        self._done_bytes += self._weights.stored_bytes[name]
        if self._progress is not None:
            self._progress(self._done_bytes, self._all_bytes)
        return values

    def matrix(self, name: str, out_features: int, in_features: int) -> PackedLinear:
        return pack(self.tensor(name, out_features, in_features))

    def joined(self, at: str, rows: dict[str, int], width: int, *, bias: bool) -> PackedLinear:
        """Matrices that read the same input, as one: `rows` names them with their row counts."""
        matrix = torch.cat([self.tensor(f"{at}{n}.weight", r, width) for n, r in rows.items()])
        if not bias:
            return pack(matrix)
        return pack(matrix, torch.cat([self.tensor(f"{at}{n}.bias", r) for n, r in rows.items()]))

    def finish(self) -> None:
        """A tensor that this model code would silently leave out makes another model: refuse."""
        left = sorted(name for name in self._unread if not _may_be_left(name))
        if left:
            raise ModelError(
                f"{self._weights.where} has a tensor this model has no use for: {left[0]}"
            )
        if self._progress is not None:
            self._progress(self._all_bytes, self._all_bytes)


def _may_be_left(name: str) -> bool:
    """A second copy of a tied head, and tables that follow from the configuration."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
