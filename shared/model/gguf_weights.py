"""The tensors of a GGUF file, dequantised, with the names and row order of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.gguf_index import read_index

_ONCE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights:
    """One GGUF file, mapped into memory and dequantised tensor by tensor."""

    def __init__(self, file: Path, config: ModelConfig) -> None:
        self.where = str(file)
        self._config = config
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in read_index(file)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.stored_bytes = {name: tensor.data.nbytes for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            floats = gguf.quants.dequantize(tensor.data, tensor.kind)
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise ModelError(
                f"{self.where}: {tensor.name} has the block type {kind}, which the "
                "gguf library cannot dequantise"
            ) from error
        values = torch.tensor(floats, dtype=torch.float32).view(self.shapes[name])
        if self._config.family == "llama" and ".q_proj." in name:
            return _unpermute(values, self._config.heads)
        if self._config.family == "llama" and ".k_proj." in name:
            return _unpermute(values, self._config.kv_heads)
        return values


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Back to Hugging Face's row order: llama.cpp stores llama's q and k rows with the two halves
    of each head interleaved, because its rope pairs neighbours. [Hq * D, ...] -> the same shape."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    """A name that has none keeps its own, so that an unknown tensor can be told by it."""
    if name in _ONCE:
        return _ONCE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    return name
