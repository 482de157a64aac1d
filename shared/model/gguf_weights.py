"""The tensors of a GGUF file, dequantised, with the names and row order of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.gguf_index import StoredTensor, read_index
from kvrelay.shared.model.pieces import Floats, cut_rows

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
    """One GGUF file, mapped into memory and dequantised piece by piece."""

    def __init__(self, file: Path, config: ModelConfig) -> None:
        self.where = str(file)
        self._config = config
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in read_index(file)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.stored_bytes = {name: tensor.data.nbytes for name, tensor in self._tensors.items()}

    def pieces(self, name: str) -> Iterator[Floats]:
        tensor = self._tensors[name]
        heads = self._interleaved_heads(name)
        order = _halves_apart(tensor.shape[0], heads) if heads else None
        if len(tensor.shape) == 1:
            values = self._dequantised(tensor, tensor.data)
            yield values if order is None else values[:, order]
            return
        for some in cut_rows(tensor.shape):
            yield self._dequantised(tensor, tensor.data[some if order is None else order[some]])
            tensor.file.leave(tensor.data[some])  # with an order, of the rows around those read

    def _interleaved_heads(self, name: str) -> int | None:
        """llama.cpp stores llama's q and k rows with the two halves of each head interleaved,
        because its rope pairs neighbours. None: the rows are in Hugging Face's order."""
        if self._config.family != "llama":
            return None
        if ".q_proj." in name:
            return self._config.heads
        return self._config.kv_heads if ".k_proj." in name else None

    def _dequantised(self, tensor: StoredTensor, rows: NDArray[np.uint8]) -> Floats:
        try:
            # As one long row: the library would go through them by 16, which takes it longer.
            floats: Floats = quants.dequantize(rows.reshape(1, -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.where}: {tensor.name} has the block type {tensor.kind.name}, which the "
                "gguf library cannot dequantise"
            ) from error
        return floats.reshape(-1, tensor.shape[-1])


def _halves_apart(rows: int, heads: int) -> NDArray[np.intp]:
    """[Hq * D]: which of the interleaved rows comes at each place of Hugging Face's order."""
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(rows)


def _hugging_face_name(name: str) -> str:
    """A name that has none keeps its own, so that an unknown tensor can be told by it."""
    if name in _ONCE:
        return _ONCE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    return name
