"""Streams put together, field by field, into what the same request without one is answered. Pure.

Knows of the API only which fields are said once and which grow; whatever else comes is joined, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

ONCE = frozenset({"index", "id", "type", "role", "refusal", "finish_reason"})
"""Fields that do not grow: told again they must be the same."""
CHUNK = frozenset({"id", "object", "created", "model", "choices", "usage"})


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer that these chunks add up to, with `usage` if they told it at their end."""
    heads = [
        {name: chunk[name] for name in ("id", "object", "created", "model")} for chunk in chunks
    ]
    assert all(head == heads[0] for head in heads), heads
    choices: dict[int, Any] = {}
    answer: dict[str, Any] = {}
    for chunk in chunks:
        answer = grown(answer, {name: chunk[name] for name in chunk.keys() - CHUNK}, "chunk")
        for piece in chunk["choices"]:
            index = piece["index"]
            before = choices.get(index, {})
            assert before.get("finish_reason") is None, f"{piece} follows the end of its choice"
            choices[index] = grown(before, piece, f"choices[{index}]")
    *_, last = chunks
    if not last["choices"]:
        answer["usage"] = last["usage"]
    answer["choices"] = [_whole(choices[index]) for index in sorted(choices)]
    return {**heads[0], **answer}


def grown(value: Any, piece: Any, where: str, name: str = "") -> Any:
    """`value` with one more piece of it."""
    if value is None or piece is None:
        return piece if value is None else value
    if name in ONCE:
        assert value == piece, f"{where}: {piece!r} after {value!r}"
        return value
    assert type(value) is type(piece), f"{where}: {piece!r} after {value!r}"
    if isinstance(value, dict):
        fields = {key: grown(value.get(key), piece[key], f"{where}.{key}", key) for key in piece}
        return {**value, **fields}
    if name == "tool_calls":
        return _calls(value, piece, where)
    assert isinstance(value, str | list), f"{where}: {piece!r} after {value!r}"
    return value + piece


def _calls(calls: list[Any], pieces: list[Any], where: str) -> list[Any]:
    """Those of a call have its index; calls come in order."""
    calls = [*calls]
    for piece in pieces:
        at = piece["index"]
        assert len(calls) - 1 <= at <= len(calls), f"{where}: {piece!r} behind {len(calls)} calls"
        calls[at:] = [grown(calls[at] if at < len(calls) else None, piece, f"{where}[{at}]")]
    return calls


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice's pieces as a choice: where a stream has `delta` others have `message`."""
    if "delta" not in choice:
        return choice
    message = {"content": None, "refusal": None, **choice["delta"]}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {name: call[name] for name in call if name != "index"} for call in message["tool_calls"]
        ]
    return {**{k: v for k, v in choice.items() if k != "delta"}, "message": message}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two answers are not the same."""
    if type(one) is not type(other):
        yield f"{where}: {one!r:.200} and {other!r:.200}"
    elif isinstance(one, dict):
        for name in sorted(one.keys() | other.keys()):
            if name in one and name in other:
                yield from differences(one[name], other[name], f"{where}.{name}")
            else:
                yield f"{where}.{name}: only in {'the first' if name in one else 'the second'}"
    elif isinstance(one, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} of them"
        for at, pair in enumerate(zip(one, other, strict=False)):
            yield from differences(*pair, f"{where}[{at}]")
    elif one != other:
        yield f"{where}: {one!r:.200} and {other!r:.200}"
