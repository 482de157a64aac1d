"""A checkpoint's tensors become a model of torch tensors, for the reference kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.kernels.linear.reference import PackedLinear, pack
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.kv.layout import DType
from kvrelay.shared.model.llama import Layer, Llama
from kvrelay.shared.model.reader import EMBEDDING, HEAD, Progress, TensorReader
from kvrelay.shared.model.rope import rope_table
from kvrelay.shared.model.weights import Weights

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
    source = TensorReader(weights, dtype, progress)
    reader = _TorchReader(source)
    embed = reader.tensor(EMBEDDING, config.vocab, config.hidden)
    layers = tuple(_layer(reader, config, number) for number in range(config.layers))
    norm = reader.tensor("model.norm.weight", config.hidden)
    if source.shares_head(config.tied_head):
        head = pack(embed)
    else:
        head = reader.matrix(HEAD, config.vocab, config.hidden)
    factors = None
    if "rope_freqs.weight" in weights.shapes:
        factors = source.floats("rope_freqs.weight", config.head_dim // 2)
    source.finish()
    rope = torch.from_numpy(rope_table(config, positions, factors))
    return Llama(config, embed, layers, norm, head, rope)


def _layer(reader: _TorchReader, config: ModelConfig, number: int) -> Layer:
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


class _TorchReader:
    """Tensors as torch has them, packed where they are matrices."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def tensor(self, name: str, *shape: int) -> Tensor:
        values = torch.from_numpy(self._reader.tensor(name, *shape))
        return values if values.dtype == torch.float32 else values.view(torch.bfloat16)

    def matrix(self, name: str, out_features: int, in_features: int) -> PackedLinear:
        return pack(self.tensor(name, out_features, in_features))

    def joined(self, at: str, rows: dict[str, int], width: int, *, bias: bool) -> PackedLinear:
        """Matrices that read the same input, as one: `rows` names them with their row counts."""
        matrix = torch.cat([self.tensor(f"{at}{n}.weight", r, width) for n, r in rows.items()])
        if not bias:
            return pack(matrix)
        return pack(matrix, torch.cat([self.tensor(f"{at}{n}.bias", r) for n, r in rows.items()]))
