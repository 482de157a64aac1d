"""Grammars that make a model call, in its own format, as llguidance reads them (Lark with %json).

What is prescribed is what the parsers of `forms` read; a tag that is a control token of the model
is named by its id, since as text it would be other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.services.router.tools.formats import CallFormat
from kvrelay.services.router.tools.message import Thinking

Schema = Mapping[str, Any]

NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python's json writes it, which most templates use: a grammar that leaves blanks open lets a
model write nothing else."""


@dataclass(frozen=True, slots=True)
class Function:
    """One that may be called."""

    name: str
    parameters: Schema | None
    strict: bool = False
    """What the schema says and cannot be enforced is an error, not passed over."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer must be."""

    functions: Sequence[Function]
    must_call: bool
    """Nothing but calls; otherwise there may be text, and calls are as they should be."""
    many: bool
    """More than one call."""
    thinking: Thinking | None = None
    """An answer may begin with reasoning."""
    thinking_begun: bool = False
    content: bool = False
    """What is no call is kept to a grammar of its own, named content."""


def call_grammar(wanted: Wanted, format: CallFormat, token_id: Callable[[str], int | None]) -> str:
    """`token_id`: of a text that is one control token."""

    def tag(text: str) -> str:
        id = token_id(text)
        return _quoted(text) if id is None else f"<[{id}]>"

    calls = _Rules(wanted, format, tag)
    if wanted.content:
        rules = calls.beside_content()
    else:
        rules = calls.mandatory() if wanted.must_call else calls.possible()
    return "\n".join([*rules, *calls.functions(), "TEXT: /(.|\\n)*/", ""])


def _quoted(text: str) -> str:
    return json.dumps(text)


class _Rules:
    def __init__(self, wanted: Wanted, format: CallFormat, tag: Callable[[str], str]) -> None:
        self._wanted = wanted
        self._format = format
        self._tag = tag

    def mandatory(self) -> list[str]:
        think, rules = self._think(self._wanted.must_call)
        return [f"start: {think}calls", *rules, *self._calls()]

    def beside_content(self) -> list[str]:
        think, rules = self._think(True)
        if not self._wanted.functions:
            return [f"start: {think}@content", *rules]
        return [f"start: {think}(calls | @content)", *rules, *self._calls()]

    def possible(self) -> list[str]:
        """Text, and calls where a tag, or the beginning, makes one of it."""
        think, rules = self._think(False)
        opening = self._format.tags[:1]
        if self._format.name in ("llama", "json"):
            other = r"/[ \t\r\n]*[^{\[` \t\r\n](.|\n)*/"
            return [
                f"start: {think}(calls | other)",
                f'other: {other} | ""',
                *rules,
                *self._calls(),
            ]
        head = self._upto(opening[0])
        if self._wanted.many:
            start = f"start: {think}(head behind)* TEXT"
        else:
            start = f"start: {think}(TEXT | head behind)"
        return [start, *rules, head, *self._behind()]

    def _upto(self, tag: str) -> str:
        """Any text with the tag at its end, and nowhere before."""
        spelled = self._tag(tag)
        return f"head{'' if spelled.startswith('<[') else '[lazy]'}: TEXT {spelled}"

    def _think(self, may_begin: bool) -> tuple[str, list[str]]:
        tags = self._wanted.thinking
        if tags is None or not (self._wanted.thinking_begun or may_begin):
            return "", []
        end = self._tag(tags.end)
        lazy = "" if end.startswith("<[") else "[lazy]"
        rules = [f"thought{lazy}: TEXT {end}", "GAP: /[ \\n]{0,4}/"]
        if self._wanted.thinking_begun:
            return "thought GAP ", rules
        return f"({self._tag(tags.begin)} thought GAP)? ", rules

    def _calls(self) -> list[str]:
        name, many = self._format.name, self._wanted.many
        if name == "hermes":
            opening = self._tag("<tool_call>")
            more = f' ("\\n" {opening} behind)*' if many else ""
            return [f"calls: {opening} behind{more}", *self._behind()]
        if name == "mistral":
            opening = self._tag("[TOOL_CALLS]")
            more = f" ({opening} behind)*" if many and self._format.named else ""
            return [f"calls: {opening} behind{more}", *self._behind()]
        if name == "llama":
            return ["calls: call" + (' ("; " call)*' if many else "")]
        return ["calls: call" + (' | "[" call (", " call)* "]"' if many else "")]

    def _behind(self) -> list[str]:
        """The rule for what follows a call's opening tag."""
        if self._format.name == "hermes":
            return [f'behind: "\\n" call "\\n" {self._tag("</tool_call>")}']
        if self._format.named:
            return ["behind: call"]
        return ['behind: "[" call ' + ('(", " call)* ' if self._wanted.many else "") + '"]"']

    def functions(self) -> list[str]:
        functions = self._wanted.functions
        if not functions:
            return []
        rules = ["call: " + " | ".join(f"f{at}" for at in range(len(functions)))]
        for at, function in enumerate(functions):
            rules.append(f"f{at}: {self._call(function.name, f'a{at}')}")
            rules.append(f"a{at}: %json {json.dumps(_enforced(function))}")
        return rules

    def _call(self, name: str, arguments: str) -> str:
        if self._format.named:
            return f"{_quoted(name)} {self._tag('[ARGS]')} {arguments}"
        head = f'{{"name": {_quoted(name)}, "{self._format.arguments_key}": '
        return f'{_quoted(head)} {arguments} "}}"'


def _enforced(function: Function) -> dict[str, Any]:
    schema = NO_PARAMETERS if function.parameters is None else function.parameters
    return {"type": "object", **schema, "x-guidance": {**_SPACING, "lenient": not function.strict}}
