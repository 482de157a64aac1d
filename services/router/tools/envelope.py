"""One call as a JSON object: `{"name": "f", "arguments": {...}}`, as most formats have it.

Until the name is known and the arguments begin nothing is told: the text may still be none. From
there on it is a call, and its arguments are told as they come, character for character.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from kvrelay.services.router.tools.deltas import Deltas
from kvrelay.services.router.tools.json_text import (
    character_of_string,
    short_string,
    skip_scalar,
    tell_object,
)
from kvrelay.services.router.tools.reader import Reader, Wait

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type")


@dataclass(frozen=True, slots=True)
class Names:
    """Which names make a call of what looks like one."""

    declared: Set[str]
    any: bool
    """Behind a tag every name does; without one the text may be an answer in JSON."""

    def has(self, name: str) -> bool:
        return name in self.declared or (self.any and _NAME.fullmatch(name) is not None)


@dataclass(slots=True)
class _Head:
    """What is known of a call before it is told."""

    names: Names
    name: str | None = None
    arguments: str | None = None
    """Those that stood before the name."""

    @property
    def is_call(self) -> bool:
        """Whether the object may end with this. Behind a tag there may be no arguments."""
        return self.name is not None and (self.arguments is not None or self.names.any)


def envelope(reader: Reader, out: Deltas, names: Names) -> Wait[bool]:
    """Reads the object here, if it is a call. If not: False, and `at` is where it turned out."""
    head = _Head(names)
    character = yield from reader.peek()
    expected = "{"
    while character == expected:
        reader.at += 1
        yield from reader.skip_blanks()
        key = yield from _key(reader)
        if key in _ARGUMENTS and head.name is not None and head.arguments is None:
            told = yield from _call(reader, out, head.name)
            if told:
                yield from _tail(reader, out)
            return told
        if not (yield from _member(reader, head, key)):
            return False
        character = yield from reader.skip_blanks()
        expected = ","
    if character != "}" or not head.is_call:
        return False
    reader.at += 1
    out.call(head.name or "")
    out.arguments("{}" if head.arguments is None else head.arguments)
    out.call_is_whole()
    return True


def arguments(reader: Reader, out: Deltas, name: str) -> Wait[bool]:
    """The call of which these are the arguments: an object. False, and nothing is read, if not."""
    if (yield from reader.peek()) != "{":
        return False
    out.call(name)
    if (yield from tell_object(reader, out.arguments)):
        out.call_is_whole()
    return True


def _key(reader: Reader) -> Wait[str | None]:
    """The next member's, up to where its value begins."""
    key = yield from short_string(reader)
    if key is None or (yield from reader.skip_blanks()) != ":":
        return None
    reader.at += 1
    yield from reader.skip_blanks()
    return key


def _member(reader: Reader, head: _Head, key: str | None) -> Wait[bool]:
    """A value that is not told yet. Whether a call may have it."""
    if key == "name" and head.name is None:
        head.name = yield from short_string(reader)
        return head.name is not None and head.names.has(head.name)
    if key in _ARGUMENTS and head.arguments is None and (yield from reader.peek()) == "{":
        pieces: list[str] = []
        whole = yield from tell_object(reader, pieces.append, keep=True)
        head.arguments = "".join(pieces)
        return whole
    return key in _BESIDE and (yield from skip_scalar(reader))


def _call(reader: Reader, out: Deltas, name: str) -> Wait[bool]:
    if (yield from reader.peek()) == '"':
        return (yield from _quoted_arguments(reader, out, name))
    return (yield from arguments(reader, out, name))


def _tail(reader: Reader, out: Deltas) -> Wait[None]:
    """What follows the arguments in the object; none of it is lost if that is not its end."""
    if out.whole_calls < out.calls:
        return
    start = reader.at
    while True:
        character = yield from reader.skip_blanks()
        if character in ("}", ""):
            reader.at += len(character)
            return
        if character != ",":
            break
        reader.at += 1
        yield from reader.skip_blanks()
        if (yield from _key(reader)) not in _BESIDE or not (yield from skip_scalar(reader)):
            break
    out.content(reader.since(start))


def _quoted_arguments(reader: Reader, out: Deltas, name: str) -> Wait[bool]:
    """Arguments that were written as JSON in a string; they are told as that string's content."""
    reader.at += 1
    begun = False
    while True:
        start = reader.at
        character = yield from character_of_string(reader)
        if character is None or (not begun and character not in "{ \n"):
            reader.at = start
            return begun
        if not character:
            break
        if not begun and character == "{":
            begun = True
            out.call(name)
        if begun:
            out.arguments(character)
            reader.drop()
    if begun:
        out.call_is_whole()
    return begun
