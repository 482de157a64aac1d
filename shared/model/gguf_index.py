"""Where each tensor of a GGUF file lies, found without building the file's metadata.

The `gguf` library makes an array of every token and merge that it passes on the way, which takes
seconds. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little endian). Every length is checked against the end of the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.mapped import MappedFile

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, the contiguous dimension last."""
    kind: GGMLQuantizationType
    data: NDArray[np.uint8]
    """[..., bytes of a row], mapped."""
    file: MappedFile


def read_index(file: Path) -> tuple[StoredTensor, ...]:
    """All tensors, in file order. Raises `ModelError` naming the file: cut off or garbled."""
    try:
        return _Cursor(MappedFile(file)).tensors()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise ModelError(f"{file} is cut off or no usable GGUF file: {error}") from error


class _Cursor:
    """Walks forward through the file; a defect is a `ValueError` or `struct.error`."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._data = file.bytes
        self._buffer = file.bytes.data
        self._at = 0
        self._alignment = _DEFAULT_ALIGNMENT

    def tensors(self) -> tuple[StoredTensor, ...]:
        if bytes(self._buffer[:4]) != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        self._at = 4
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        tensors, pairs = self._number("Q"), self._number("Q")
        for _ in range(pairs):
            self._skip_pair()
        found = [self._info() for _ in range(tensors)]
        base = self._at + -self._at % self._alignment
        return tuple(self._stored(base, *info) for info in found)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, kind, offset from the start of the data)."""
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _stored(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> StoredTensor:
        quantisation = GGMLQuantizationType(kind)  # ValueError for a number it does not know
        per_block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if shape[-1] % per_block:
            raise ValueError(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {per_block}")
        rows = (*shape[:-1], shape[-1] // per_block * block_bytes)
        first, size = base + offset, int(np.prod(rows, dtype=object))
        if first + size > len(self._data):
            raise ValueError(f"tensor {name!r} ends {first + size - len(self._data)} bytes past it")
        data = self._data[first : first + size].reshape(rows)
        return StoredTensor(name, shape, quantisation, data, self._file)

    def _skip_pair(self) -> None:
        key, kind = self._string(), self._number("I")
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            self._alignment = max(1, self._number("I"))
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            item, count = self._number("I"), self._number("Q")
            if item == _STRING:
                for _ in range(count):
                    self._skip(self._number("Q"))
            else:
                self._skip(self._scalar_bytes(item) * count)
        else:
            self._skip(self._scalar_bytes(kind))

    @staticmethod
    def _scalar_bytes(kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return _SCALAR_BYTES[kind]

    def _string(self) -> str:
        size = self._number("Q")
        first = self._at
        self._skip(size)
        return bytes(self._buffer[first : first + size]).decode(
            "utf-8"
        )  # UnicodeDecodeError is a ValueError

    def _number(self, letter: str) -> int:
        number: int = struct.unpack_from("<" + letter, self._buffer, self._at)[0]
        self._at += struct.calcsize(letter)
        return number

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes expected, {len(self._data) - self._at} left")
        self._at += size
