"""The tensors of a checkpoint by their Hugging Face names, whatever file they are in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.checkpoint.source import ModelSource, weight_files
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.gguf_weights import GGUFWeights

_FLOATS = ("F32", "F16", "BF16")


class Weights(Protocol):
    """An open checkpoint. Reading never gives anything but the file's own numbers."""

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

    def read(self, name: str) -> Tensor:
        """A tensor of `shapes`, dequantised if need be, in its stored or in a wider dtype.

        Raises `ModelError` when its bytes are not there or not understood.
        """
        ...


def open_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Raises `ModelError` naming the file that is missing, cut off or of an unknown form."""
    if source.kind == "gguf":
        return GGUFWeights(source.path, config)
    return SafetensorsWeights(source.path)


class SafetensorsWeights:
    """The safetensors files of a folder, mapped into memory and read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.stored_bytes: dict[str, int] = {}
        self._file_of: dict[str, Path] = {}
        for file in weight_files(folder):
            self._index(file)

    def _index(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (a handle, not a dict)
                    piece = shard.get_slice(name)
                    if piece.get_dtype() not in _FLOATS:
                        raise ModelError(
                            f"{file}: {name} has the type {piece.get_dtype()}, which is not "
                            f"supported ({', '.join(_FLOATS)} are)"
                        )
                    if name in self.shapes:
                        raise ModelError(f"{file}: {name} is in another file of the model too")
                    shape = tuple(piece.get_shape())
                    self.shapes[name] = shape
                    width = 4 if piece.get_dtype() == "F32" else 2
                    self.stored_bytes[name] = width * torch.Size(shape).numel()
                    self._file_of[name] = file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is cut off or no safetensors file: {error}") from error

    def read(self, name: str) -> Tensor:
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as shard:
                tensor: Tensor = shard.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot read {name}: {error}") from error
