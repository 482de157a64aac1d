"""Typed access to the fields of a model's configuration, whose every error names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.shared.errors import ModelError


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of `json` for files whose names are unique: else `ValueError`."""
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"{name!r} stands in it twice")
        named[name] = value
    return named


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one object. A field that is null counts as missing.

    Every method raises `ModelError` when the field is missing and has no default, or has another
    type than the one asked for.
    """

    where: str
    values: Mapping[str, object]

    def refuse(self, name: str, value: object) -> ModelError:
        """The error for a value that is understood but not supported."""
        return ModelError(f"{self.where}: {name} = {value!r} is not supported")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, not negative."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "a whole number", value)
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(name, default)
        if value < 1:
            raise self._wrong(name, "at least 1", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """One whole number below 2^31 or a list of them, as token ids are; missing is empty."""
        value = self.values.get(name)
        many = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item < 1 << 31 for item in many):
            raise self._wrong(name, "a whole number below 2^31 or a list of them", value)
        return tuple(many)

    def gguf_ends(self) -> tuple[int, ...]:
        """The end ids that a GGUF file declares. All ones is how its writers say none."""
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        declared = [key for key in keys if self.values.get(key) != 0xFFFFFFFF]
        return tuple(dict.fromkeys(id for key in declared for id in self.integers(key)))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; missing is empty."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings", value)
        return tuple(value)

    def length(self, name: str) -> int:
        """How many items a list has."""
        value = self._get(name, None)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return len(value)

    def inner(self, name: str) -> Fields | None:
        """The object in this field, if there is one that is not empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(f"{self.where}: {name}", value) if value else None

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {name}")
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self.where}: {name} must be {wanted}, not {str(value)[:60]!r}")
