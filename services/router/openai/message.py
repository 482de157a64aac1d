"""The seam between an answer's text and a chat message: what of the text is which field.

A parser gets the text of one leg piece by piece, cut anywhere, and says which fields of the message
grow by it. It may hold text back. A stream tells each piece as it comes; a whole answer is what the
same parser says of the whole text, added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvrelay.shared.types import FinishReason, ValidRequest

Fields: TypeAlias = Mapping[str, Any]
"""As a stream's `delta` words them, without the role; empty for nothing new."""


class Ending(NamedTuple):
    fields: Fields
    """What was held back."""
    reason: str
    """`finish_reason` as it is told."""


class MessageParser(Protocol):
    """One for each leg: `feed` any number of times, then `finish` once."""

    def feed(self, text: str) -> Fields: ...

    def finish(self, reason: FinishReason) -> Ending: ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> Fields:
        return {"content": text}

    def finish(self, reason: FinishReason) -> Ending:
        return Ending({}, reason.value)


def parser_of(request: ValidRequest) -> MessageParser:
    """A new one, for one leg of the request."""
    return PlainText()


def message_of(deltas: Sequence[Fields]) -> dict[str, Any]:
    """The whole message that these fields of a stream add up to."""
    content = "".join(fields.get("content", "") for fields in deltas)
    return {"role": "assistant", "content": content, "refusal": None}
