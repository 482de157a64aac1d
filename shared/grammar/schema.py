"""What a JSON schema may say here: what the library would pass over in silence is refused by name.

It follows draft 2020-12 and refuses keywords of it that it cannot keep. Keywords that no draft has
are annotations, as JSON Schema itself says. What is left are words of older drafts, an option of
the library's own, and a count that it keeps only by luck, as it may write one name twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

_OLD = {
    "additionalItems": "use prefixItems and items",
    "disallow": "it is of an older draft",
    "divisibleBy": "use multipleOf",
    "extends": "use allOf",
}
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_SAFE = "/#%:?&=+,;@!$'()*~[]"
"""In references: other characters than ASCII's are written as they are by some, like pydantic."""


class BadSchema(ValueError):
    """It cannot be enforced; the message names the keyword and where it stands."""


def prepare(schema: Any) -> dict[str, Any]:
    """The schema without what asks for nothing; changed in place. Raises `BadSchema`."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise BadSchema("it must be an object")
    if "x-guidance" in schema:
        raise BadSchema("x-guidance: options of the library are not taken from schemas")
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, part = left.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            _check(path, part)
            left += _parts(path, part)
            ref = part.get("$ref")
            if isinstance(ref, str):
                left += _referred(schema, ref)
                part["$ref"] = quote(ref, safe=_SAFE)
    return schema


def _check(path: str, part: dict[str, Any]) -> None:
    where = f"{path}/" if path else ""
    for name, instead in _OLD.items():
        if name in part:
            raise BadSchema(f"{where}{name} is not supported: {instead}")
    if isinstance(part.get("items"), list):
        raise BadSchema(f"{where}items: a list of schemas is called prefixItems")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(name), bool):
            raise BadSchema(f"{where}{name} must be a number")
    least = part.get("minProperties")
    named = _count_names(part.get("required"))
    if isinstance(least, int | float) and least > max(1, named):
        raise BadSchema(
            f"{where}minProperties: {least:g} is more than 1 and than the {named} properties that "
            "are required, which is not supported"
        )
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]


def _count_names(value: object) -> int:
    return len({name for name in value if isinstance(name, str)}) if isinstance(value, list) else 0


def _parts(path: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _OF_SCHEMAS:
        named = part.get(keyword)
        if isinstance(named, dict):
            for name, inner in named.items():
                yield f"{path}/{keyword}/{name[:64]}", inner
    for keyword in _LISTS:
        several = part.get(keyword)
        if isinstance(several, list):
            for at, inner in enumerate(several):
                yield f"{path}/{keyword}/{at}", inner
    for keyword in _SINGLE:
        yield f"{path}/{keyword}", part.get(keyword)


def _referred(schema: dict[str, Any], ref: str) -> Iterator[tuple[str, Any]]:
    """Also a place that no keyword makes one of a schema can be referred to."""
    if not ref.startswith("#/"):
        return
    found: Any = schema
    for step in ref[2:].split("/"):
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step[:9]) < len(found):
            found = found[int(step[:9])]
        else:
            return
    yield ref[1:], found
