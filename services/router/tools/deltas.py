"""What parsers give: pieces of one answer's message, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments; all of them together are what the model wrote."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallStart | Arguments


class Deltas:
    """What was found since the last `taken`, with neighbours of one kind joined."""

    def __init__(self, call_id: Callable[[int], str], one_call: bool = False) -> None:
        """`one_call`: nothing is taken in any more once the first call is whole."""
        self._call_id = call_id
        self._one_call = one_call
        self._found: list[Delta] = []
        self.calls = 0
        """Calls that were begun."""
        self.whole_calls = 0
        """Of those the ones whose arguments came to their end."""

    @property
    def over(self) -> bool:
        return self._one_call and self.whole_calls > 0

    def taken(self) -> list[Delta]:
        found, self._found = self._found, []
        return found

    def content(self, text: str) -> None:
        if not text or self.over:
            return
        last = self._found[-1] if self._found else None
        if isinstance(last, Content):
            self._found[-1] = Content(last.text + text)
        else:
            self._found.append(Content(text))

    def reasoning(self, text: str) -> None:
        if not text or self.over:
            return
        last = self._found[-1] if self._found else None
        if isinstance(last, Reasoning):
            self._found[-1] = Reasoning(last.text + text)
        else:
            self._found.append(Reasoning(text))

    def call(self, name: str) -> None:
        if self.over:
            return
        self._found.append(CallStart(self.calls, self._call_id(self.calls), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        if not text or self.over:
            return
        last = self._found[-1] if self._found else None
        if isinstance(last, Arguments):
            self._found[-1] = Arguments(last.index, last.text + text)
        else:
            self._found.append(Arguments(self.calls - 1, text))

    def call_is_whole(self) -> None:
        if not self.over:
            self.whole_calls += 1
