"""The seam between an answer's text and a chat message: what of the text is which field.

A parser gets the text of one leg piece by piece, cut anywhere, and says which fields of the message
grow by it. It may hold text back. A stream tells each piece as it comes; a whole answer is what the
same parser says of the whole text, added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvrelay.services.router.tools import message as parser
from kvrelay.services.router.tools.deltas import Arguments, CallStart, Content, Delta, Reasoning
from kvrelay.services.router.tools.forms import FORMS
from kvrelay.services.router.tools.history import call_id
from kvrelay.shared.types import FinishReason, MessageForm, ValidRequest

Fields: TypeAlias = Mapping[str, Any]
"""As a stream's `delta` words them, without the role; empty for nothing new."""


class Ending(NamedTuple):
    fields: Sequence[Fields]
    """What was held back."""
    reason: str
    """`finish_reason` as it is told."""


class MessageParser(Protocol):
    """One for each leg: `feed` any number of times, then `finish` once."""

    def feed(self, text: str) -> Sequence[Fields]: ...

    def finish(self, reason: FinishReason) -> Ending: ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> Sequence[Fields]:
        return [{"content": text}]

    def finish(self, reason: FinishReason) -> Ending:
        return Ending([], reason.value)


class MarkedText:
    """Reasoning, content and tool calls are told apart by how this model marks them."""

    def __init__(self, form: MessageForm, call_id: Callable[[int], str]) -> None:
        self._parser = parser.MessageParser(
            FORMS[form.calls],
            frozenset(form.names),
            call_id,
            None if form.thinking is None else parser.Thinking(*form.thinking),
            begun=form.thinking_begun,
            one_call=form.one_call,
        )

    def feed(self, text: str) -> Sequence[Fields]:
        return [*map(_fields, self._parser.feed(text))]

    def finish(self, reason: FinishReason) -> Ending:
        """Calls are the reason only if all of them are whole."""
        held = [*map(_fields, self._parser.finish())]
        called = reason is FinishReason.STOP and self._parser.called
        return Ending(held, "tool_calls" if called else reason.value)


def _fields(delta: Delta) -> Fields:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]
            }
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def parser_of(request: ValidRequest, leg: int) -> MessageParser:
    """A new one, for this leg of the request."""
    form = request.form.message
    if form == MessageForm():
        return PlainText()

    def id_of(index: int) -> str:
        return call_id(request.request_id, leg, index, short=form.short_ids)

    return MarkedText(form, id_of)


def message_of(deltas: Sequence[Fields]) -> dict[str, Any]:
    """The whole message that these fields of a stream add up to. Its content is null, not empty,
    beside calls."""
    content = "".join(fields.get("content", "") for fields in deltas)
    reasoning = "".join(fields.get("reasoning_content", "") for fields in deltas)
    calls: list[dict[str, Any]] = []
    for fields in deltas:
        for piece in fields.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append(
                    {"id": piece["id"], "type": "function", "function": {**piece["function"]}}
                )
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
