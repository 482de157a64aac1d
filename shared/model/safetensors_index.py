"""Where each tensor of a safetensors file lies.

Format: https://github.com/huggingface/safetensors#format: the length of the header in 8 bytes, the
header as JSON, the tensors. The places must tile the rest of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.checkpoint.fields import named_once
from kvrelay.shared.errors import ModelError
from kvrelay.shared.model.mapped import MappedFile

Kind = Literal["F32", "F16", "BF16"]
ITEM_BYTES: Mapping[Kind, int] = {"F32": 4, "F16": 2, "BF16": 2}
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    data: NDArray[np.uint8]
    """[bytes], mapped."""
    file: MappedFile


def read_index(file: Path) -> tuple[StoredTensor, ...]:
    """All tensors. Raises `ModelError` naming the file: cut off, garbled, of an unknown type,
    or with holes and overlaps between the tensors."""
    try:
        mapped = MappedFile(file)
        size = int.from_bytes(mapped.bytes[:8].tobytes(), "little")
        if size > min(_MOST_HEADER_BYTES, len(mapped.bytes) - 8):
            raise ValueError(f"a header of {size} bytes in a file of {len(mapped.bytes)}")
        text = mapped.bytes[8 : 8 + size].tobytes()
        header = json.loads(text, object_pairs_hook=named_once)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        stored = tuple(_stored(name, entry, mapped, 8 + size) for name, entry in entries.items())
        _check_tiled(entries, len(mapped.bytes) - 8 - size)
        return stored
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except _UnknownType as error:
        raise ModelError(f"{file}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is cut off, damaged or no safetensors file: {error}") from error


class _UnknownType(Exception):
    """The file is right, but holds numbers that are not understood."""


def _stored(name: str, entry: Mapping[str, object], mapped: MappedFile, base: int) -> StoredTensor:
    kind = next((known for known in ITEM_BYTES if known == entry["dtype"]), None)
    if kind is None:
        known = ", ".join(ITEM_BYTES)
        raise _UnknownType(
            f"{name} has the type {entry['dtype']}, which is not supported ({known} are)"
        )
    shape = tuple(_whole_numbers(name, entry["shape"]))
    first, end = _whole_numbers(name, entry["data_offsets"])
    if end - first != ITEM_BYTES[kind] * math.prod(shape):
        raise ValueError(f"tensor {name!r} has {end - first} bytes for the shape {list(shape)}")
    if base + end > len(mapped.bytes):
        raise ValueError(f"tensor {name!r} ends {base + end - len(mapped.bytes)} bytes past it")
    return StoredTensor(name, shape, kind, mapped.bytes[base + first : base + end], mapped)


def _check_tiled(entries: Mapping[str, Mapping[str, object]], size: int) -> None:
    """The format wants each byte in one tensor: anything else is another tensor's numbers."""
    spans = sorted((_whole_numbers(name, e["data_offsets"]), name) for name, e in entries.items())
    due, last = 0, "the header"
    for (first, end), name in spans:
        if first != due:
            raise ValueError(
                f"tensor {name!r} begins at byte {first} of the data, not at {due}, behind {last}"
            )
        due, last = end, f"tensor {name!r}"
    if due != size:
        raise ValueError(f"{size - due} bytes follow the last tensor, behind {last} at {due}")


def _whole_numbers(name: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"tensor {name!r} has {value!r} where whole numbers should be")
    return value
