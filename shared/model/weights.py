"""The tensors of a checkpoint by their Hugging Face names, whatever file they are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource, shards_of_tensors, weight_files
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.pieces import Floats, cut_rows, widened
from kvrelay.shared.model.safetensors_index import ITEM_BYTES, Kind, StoredTensor, read_index


class Weights(Protocol):
    """An open checkpoint. Reading never gives anything but the file's own numbers.

    Different tensors may be read by several threads at once.
    """

    @property
    def where(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By name."""
        ...

    @property
    def stored_bytes(self) -> Mapping[str, int]:
        """By name: what each tensor takes in the file."""
        ...

    def pieces(self, name: str) -> Iterator[Floats]:
        """The rows of a tensor of `shapes`, in order: arrays [some rows, columns]. A vector is one
        row. A piece is valid until the next one is asked for.

        Raises `ModelError` when its bytes are not there or not understood.
        """
        ...


def follows_from_config(name: str) -> bool:
    """Tables that older folders hold and nothing reads."""
    return name.endswith("rotary_emb.inv_freq")


def open_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Raises `ModelError` naming the file that is missing, cut off or of an unknown form."""
    if source.kind != "gguf":
        return SafetensorsWeights(source.path)
    # The gguf library is loaded only for its files.
    from kvrelay.shared.model.gguf_weights import GGUFWeights

    return GGUFWeights(source.path, config)


class SafetensorsWeights:
    """The safetensors files of a folder, mapped into memory and read piece by piece."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._tensors: dict[str, StoredTensor] = {}
        shards = shards_of_tensors(folder)
        indexed = bool(shards)
        for file in weight_files(folder):
            for tensor in read_index(file):
                shard = shards.pop(tensor.name, None)
                if indexed and shard is None and not follows_from_config(tensor.name):
                    raise ModelError(f"{file} holds {tensor.name}, which the index leaves out")
                if shard not in (None, file.name):
                    raise ModelError(f"{file} holds {tensor.name}, by the index of another file")
                if tensor.name in self._tensors:
                    raise ModelError(f"{file}: {tensor.name} is in another file of the model too")
                self._tensors[tensor.name] = tensor
        if shards:
            name, shard = min(shards.items())
            raise ModelError(f"{folder / shard} does not hold {name}, which the index says it does")
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.stored_bytes = {name: tensor.data.nbytes for name, tensor in self._tensors.items()}

    def pieces(self, name: str) -> Iterator[Floats]:
        tensor = self._tensors[name]
        rows = tensor.data.reshape(-1, tensor.shape[-1] * ITEM_BYTES[tensor.kind])
        for some in cut_rows(tensor.shape):
            yield _floats(rows[some], tensor.kind)
            tensor.file.leave(rows[some])


def _floats(rows: NDArray[np.uint8], kind: Kind) -> Floats:
    """[R, bytes] -> [R, columns]"""
    if kind == "BF16":
        return widened(rows.view(np.uint16))
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    return rows.view(np.float32)
