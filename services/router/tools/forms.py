"""The forms in which models write tool calls, each a parser of everything behind the reasoning.

Blanks between calls, and between a call and the end, belong to the form. All else that is no call
is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvrelay.services.router.tools.deltas import Deltas
from kvrelay.services.router.tools.envelope import Names, arguments, envelope
from kvrelay.services.router.tools.reader import Reader, Wait

Form: TypeAlias = Callable[[Reader, Deltas, Names], Wait[None]]

_FENCES = ("```json", "```")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]")
_NAME_CHARACTERS = 128


def hermes(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    """`<tool_call>{...}</tool_call>`, any number, anywhere. Hermes, Qwen and many others."""
    while (start := (yield from _content(reader, out, "<tool_call>"))) is not None:
        yield from reader.take("<tool_call>")
        yield from reader.skip_blanks()
        if not (yield from envelope(reader, out, names)):
            out.content(reader.since(start))
            continue
        start = reader.at
        yield from reader.skip_blanks()
        if not (yield from reader.take("</tool_call>")):
            reader.at = start


def mistral(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    """`[TOOL_CALLS][{...}, ...]` or, for each call, `[TOOL_CALLS]name[ARGS]{...}`."""
    while (start := (yield from _content(reader, out, "[TOOL_CALLS]"))) is not None:
        yield from reader.take("[TOOL_CALLS]")
        character = yield from reader.skip_blanks()
        if character == "[":
            is_call = yield from _list(reader, out, names)
        elif character == "{":
            is_call = yield from envelope(reader, out, names)
        else:
            is_call = yield from _named_call(reader, out, names)
        if not is_call:
            out.content(reader.since(start))


def llama(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    """`{...}; {...}` at the beginning, or anywhere behind `<|python_tag|>`. Llama 3."""
    yield from _leading(reader, out, Names(names.declared, any=False), opening=("{",))
    while (start := (yield from _content(reader, out, "<|python_tag|>"))) is not None:
        yield from reader.take("<|python_tag|>")
        yield from reader.skip_blanks()
        if (yield from envelope(reader, out, names)):
            yield from _further(reader, out, names)
        else:
            out.content(reader.since(start))


def bare(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    """`{...}` or `[{...}, ...]` at the beginning, maybe as a code block: plain JSON."""
    yield from _leading(
        reader, out, Names(names.declared, any=False), opening=("{", "["), fences=_FENCES
    )
    yield from _rest(reader, out)


def no_calls(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    yield from _rest(reader, out)


FORMS: Mapping[str, Form] = {
    "none": no_calls,
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "json": bare,
}
"""By the names of formats."""


def _content(reader: Reader, out: Deltas, tag: str) -> Wait[int | None]:
    """Tells everything up to the tag, except blanks that only part it from a call or the beginning.

    None at the end of the text, else where it begins if what follows the tag is no call.
    """
    start = reader.at
    parted = out.calls > 0
    character = yield from reader.skip_blanks()
    if character == tag[0] and (yield from reader.take(tag)):
        reader.at -= len(tag)
        return start
    if not character and parted:
        return None
    out.content(reader.since(start))
    return reader.at if (yield from reader.seek(tag, out.content)) else None


def _rest(reader: Reader, out: Deltas) -> Wait[None]:
    start = reader.at
    if out.calls and not (yield from reader.skip_blanks()):
        return
    reader.at = start
    while True:
        out.content(reader.rest())
        if reader.ended:
            return
        yield


def _leading(
    reader: Reader,
    out: Deltas,
    names: Names,
    *,
    opening: tuple[str, ...],
    fences: tuple[str, ...] = (),
) -> Wait[None]:
    """Calls with nothing but blanks, or a code block's fence, before them."""
    start = reader.at
    fence = ""
    character = yield from reader.skip_blanks()
    for candidate in fences:
        if (yield from reader.take(candidate)):
            fence = candidate
            character = yield from reader.skip_blanks()
            break
    if character not in opening:
        reader.at = start
        return
    is_call = _list if character == "[" else envelope
    if not (yield from is_call(reader, out, names)):
        out.content(reader.since(start))
        return
    yield from _further(reader, out, names)
    if fence:
        start = reader.at
        yield from reader.skip_blanks()
        if not (yield from reader.take("```")):
            reader.at = start


def _further(reader: Reader, out: Deltas, names: Names) -> Wait[None]:
    """More calls behind one, parted by `;` or by blanks alone."""
    while out.whole_calls == out.calls:
        start = reader.at
        if (yield from reader.skip_blanks()) == ";":
            reader.at += 1
        if (yield from reader.skip_blanks()) != "{":
            reader.at = start
            return
        if not (yield from envelope(reader, out, names)):
            out.content(reader.since(start))
            return


def _list(reader: Reader, out: Deltas, names: Names) -> Wait[bool]:
    """`[{...}, {...}]`. False if not even the first is a call; `at` is where that turned out."""
    reader.at += 1
    yield from reader.skip_blanks()
    if not (yield from envelope(reader, out, names)):
        return False
    while out.whole_calls == out.calls:
        start = reader.at
        character = yield from reader.skip_blanks()
        if character == "]":
            reader.at += 1
            break
        if character != ",":
            reader.at = start
            break
        reader.at += 1
        yield from reader.skip_blanks()
        if not (yield from envelope(reader, out, names)):
            out.content(reader.since(start))
            break
    return True


def _named_call(reader: Reader, out: Deltas, names: Names) -> Wait[bool]:
    """`name[ARGS]{...}`, with `[CALL_ID]id` between in some versions."""
    name = yield from _name(reader)
    if not names.has(name):
        return False
    yield from reader.skip_blanks()
    if (yield from reader.take("[CALL_ID]")):
        yield from _name(reader)
    yield from reader.take("[ARGS]")
    yield from reader.skip_blanks()
    return (yield from arguments(reader, out, name))


def _name(reader: Reader) -> Wait[str]:
    start = reader.at
    while reader.at - start < _NAME_CHARACTERS:
        if not _NAME.fullmatch((yield from reader.peek())):
            break
        reader.at += 1
    return reader.since(start)
