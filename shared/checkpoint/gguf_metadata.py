"""The key/value section of a GGUF file, without its tensors and without numpy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
The router reads the tokenizer from here: the `gguf` library would take seconds and 200 MB for it.
Every length in the file is checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, TypeAlias

from kvrelay.shared.errors import ModelError

GGUFValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MOST_ITEM_BYTES = 1 << 26
"""No metadata value comes near this; a garbled length does."""
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1
"""A key length, a one-byte key, a type and a one-byte value."""


def read_gguf_metadata(path: Path) -> dict[str, GGUFValue]:
    """All key/value pairs of the file, arrays as lists.

    Raises `ModelError`, which names the file, when it is missing, no GGUF, cut off or garbled.
    """
    return read_gguf_section(path)[0]


def read_gguf_section(path: Path) -> tuple[dict[str, GGUFValue], int]:
    """The same, and how many bytes from the start of the file they take."""
    try:
        with path.open("rb") as file:
            return _Section(file, path.stat().st_size).read(), file.tell()
    except OSError as error:
        raise ModelError(f"cannot read the GGUF file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not a usable GGUF file: {error}") from error


class _Section:
    """Reads forward through the section; any defect is a `ValueError` that says where."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file = file
        self._left_bytes = file_bytes

    def read(self) -> dict[str, GGUFValue]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        self._number("Q")  # how many tensors: not our business
        pairs = self._count("key/value pairs", _SMALLEST_PAIR_BYTES)
        values: dict[str, GGUFValue] = {}
        for _ in range(pairs):
            key = self._string("a key")
            if key in values:
                raise ValueError(f"key {key!r} appears twice")
            values[key] = self._value(key)
        return values

    def _value(self, key: str) -> GGUFValue:
        kind = self._number("I")
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        (value,) = self._scalars(key, kind, 1)
        return value

    def _array(self, key: str) -> GGUFValue:
        kind = self._number("I")
        if kind == _STRING:
            return [self._string(key) for _ in range(self._count(key, 8))]
        return self._scalars(key, kind, self._count(key, 1))

    def _scalars(self, key: str, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        if kind not in _SCALARS:
            raise ValueError(f"key {key!r} has the unknown value type {kind}")
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        return list(layout.unpack(self._take(layout.size)))

    def _string(self, what: str) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text of {what!r} is not UTF-8") from error

    def _count(self, what: str, item_bytes: int) -> int:
        count = self._number("Q")
        if count * item_bytes > self._left_bytes:
            raise ValueError(f"{what} claims {count} items, more than the file can hold")
        return count

    def _number(self, letter: str) -> int:
        layout = struct.Struct("<" + letter)
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _take(self, size_bytes: int) -> bytes:
        if size_bytes > min(self._left_bytes, _MOST_ITEM_BYTES):
            raise ValueError(f"it is cut off: {size_bytes} bytes expected, {self._left_bytes} left")
        data = self._file.read(size_bytes)
        self._left_bytes -= size_bytes
        if len(data) != size_bytes:
            raise ValueError(f"it is cut off: {size_bytes} bytes expected, {len(data)} read")
        return data
