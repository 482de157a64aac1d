"""JSON as it arrives: strings, short values, and objects of any length told piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.services.router.tools.reader import Reader, Wait

MAX_STRING_CHARACTERS = 256
"""Longest name and the like; a longer one is no call, so that not all of a text is held back."""

_OPENS = {"}": "{", "]": "["}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def short_string(reader: Reader) -> Wait[str | None]:
    """None, with `at` where that turned out, if there is none."""
    start = reader.at
    if (yield from reader.peek()) != '"':
        return None
    while reader.at - start < MAX_STRING_CHARACTERS:
        reader.at += 1
        character = yield from reader.peek()
        if character == '"':
            reader.at += 1
            try:
                return str(json.loads(reader.since(start)))
            except ValueError:
                return None
        if character == "\\":
            reader.at += 1
            character = yield from reader.peek()
        if not character:
            return None
    return None


def skip_scalar(reader: Reader) -> Wait[bool]:
    """Past a short string or a word such as `null`."""
    character = yield from reader.peek()
    if character == '"':
        return (yield from short_string(reader)) is not None
    start = reader.at
    while character and (character.isalnum() or character in "+-."):
        if reader.at - start == MAX_STRING_CHARACTERS:
            return False
        reader.at += 1
        character = yield from reader.peek()
    return reader.at > start


@dataclass(slots=True)
class _Nesting:
    """Where in an object a text stands.

    Outside of strings only brackets count, so that what is not quite JSON stays together; but a
    `<` there begins a tag.
    """

    open: list[str] = field(default_factory=list)
    quoted: bool = False
    escaped: bool = False

    def takes(self, character: str) -> bool:
        """Whether the text goes on with it."""
        if self.escaped:
            self.escaped = False
        elif self.quoted:
            self.escaped = character == "\\"
            self.quoted = character != '"'
        elif character == '"':
            self.quoted = True
        elif character in "{[":
            self.open.append(character)
        elif character in "}]":
            return self.open.pop() == _OPENS[character]
        return self.quoted or character != "<"


def tell_object(reader: Reader, tell: Callable[[str], None], *, keep: bool = False) -> Wait[bool]:
    """Past the object that begins here, telling its text; False where it breaks off.

    `keep`: what is told may have to be read again.
    """
    nesting = _Nesting()
    start = reader.at
    while True:
        if not reader.here:
            tell(reader.since(start))
            start = reader.at
            if not keep:
                reader.drop()
        character = yield from reader.peek()
        whole = False
        if character and nesting.takes(character):
            reader.at += 1
            whole = not nesting.open
            if not whole:
                continue
        tell(reader.since(start))
        return whole


def character_of_string(reader: Reader) -> Wait[str | None]:
    """The next one of a string, "" for the quote at its end, None where it breaks off."""
    character = yield from reader.peek()
    if not character:
        return None
    reader.at += 1
    if character == '"':
        return ""
    if character != "\\":
        return character
    escape = yield from reader.peek()
    reader.at += len(escape)
    if escape != "u":
        return _ESCAPES.get(escape)
    high = yield from _unit(reader)
    if high is None or not 0xD800 <= high < 0xE000:
        return None if high is None else chr(high)
    if high >= 0xDC00 or not (yield from reader.take("\\u")):
        return "\ufffd"
    low = yield from _unit(reader)
    if low is None or not 0xDC00 <= low < 0xE000:
        return None
    return chr(0x10000 + (high - 0xD800 << 10) + (low - 0xDC00))


def _unit(reader: Reader) -> Wait[int | None]:
    """Four hex digits."""
    value = 0
    for _ in range(4):
        digit = yield from reader.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            return None
        value = 16 * value + int(digit, 16)
        reader.at += 1
    return value
