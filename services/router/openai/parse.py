"""From the bytes of a body to a checked wire model, or a `RequestError` that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from kvrelay.services.router.openai.lenient import without_unknown
from kvrelay.services.router.openai.schema import (
    IGNORED,
    MAX_MESSAGES,
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    Wire,
    kind_of,
    shown,
)
from kvrelay.shared.errors import RequestError

Body = TypeVar("Body", bound=Wire)

MAX_SEPARATORS = 1 << 20
"""Each may stand for a JSON value, which in memory is many times larger than in the body."""

MAX_DEPTH = 100
"""Of lists and objects in each other: a bound of ours, as Python's own differs by version."""

_TOO_DEEP = f"The body is nested too deep: lists and objects may stand {MAX_DEPTH} levels deep"


def parse_body(kind: type[Body], body: bytes | bytearray, *, lenient: bool = False) -> Body:
    """Raises `RequestError`: status 400, `param` names the field.

    `lenient`: a field that is not known is left out, unless it would constrain the answer.
    """
    fields = json_object(body)
    return parse_fields(kind, without_unknown(fields, kind) if lenient else fields)


def parse_fields(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """The same of an object that was read already."""
    neutral = {name: NEUTRAL[name] for name in NEUTRAL.keys() - kind.model_fields.keys()}
    wire = _supported(fields, neutral, "", dropped=IGNORED)
    messages = wire.get("messages")
    if isinstance(messages, list):
        wire["messages"] = [
            _supported(message, NEUTRAL_IN_MESSAGE, f"messages[{at}].")
            if isinstance(message, dict)
            else message
            for at, message in enumerate(messages[: MAX_MESSAGES + 1])
        ]
    try:
        return kind.model_validate(wire)
    except ValidationError as error:
        raise _refusal(error) from error


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Raises `RequestError` for anything else than one object in strict JSON, within bounds."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_SEPARATORS:
        raise RequestError(f"The body has more than {MAX_SEPARATORS} commas and brackets")
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        if re.search(rb"\\u[dD][89a-fA-F]", body):  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise RequestError(f"The body is not valid Unicode text: {error}") from error
    except RecursionError as error:
        raise RequestError(_TOO_DEEP) from error
    except json.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    except ValueError as error:
        raise RequestError("The body has a number with too many digits") from error
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {kind_of(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RequestError(_TOO_DEEP)
    return value


def _is_deeper(value: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether lists and objects stand in each other more than so many levels deep."""
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(levels):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(f"The body names the field {name[:64]!a} twice")
            seen.add(name)
    return value


def _no_constant(name: str) -> None:
    raise RequestError(f"The body is not valid JSON: {name} is not a number")


def _supported(
    fields: Mapping[str, Any],
    neutral: Mapping[str, tuple[object, ...]],
    where: str,
    dropped: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The fields without those that ask for nothing."""
    kept = {}
    for name, value in fields.items():
        if name in dropped:
            continue
        if name not in neutral:
            kept[name] = value
        elif not (value is None or _is_one_of(value, neutral[name])):
            raise RequestError(
                f"{where}{name} is not supported by this server",
                param=where + name,
                code="unsupported_parameter",
            )
    return kept


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Equality that keeps apart what Python does not: 0 and False, 1 and True."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


CODES = {
    "extra_forbidden": "unsupported_parameter",
    "missing": "missing_required_parameter",
    "literal_error": "invalid_value",
}


def _refusal(error: ValidationError) -> RequestError:
    """The first complaint, in a person's words, with the field, the limit and the value."""
    first = error.errors(include_url=False)[0]
    kind, given = first["type"], first["input"]
    param = _param(first["loc"])
    if kind == "extra_forbidden":
        message = f"Unknown field {param!r}: this server does not know it"
    elif kind == "missing":
        message = f"{param}: this field is required"
    elif kind in ("too_short", "too_long"):
        bound, limit = ("least", "min_length") if kind == "too_short" else ("most", "max_length")
        message = f"{param}: at {bound} {first['ctx'][limit]} of them (given: {len(given)})"
    else:
        message = f"{param}: {first['msg']} (given: {shown(given)})"
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return RequestError(message, param=param, code=code)


def _param(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the names of union members that pydantic adds."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", part):
            path += f".{part}" if path else part
        elif not path:
            path = ascii(part[:64])
    return path
