"""What parsers give: pieces of one answer's message, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
        self._pieces: list[str] = []
        """Of the text of the last one found, behind what it has."""
        self.calls = 0
        """Calls that were begun."""
        self.whole_calls = 0
        """Of those the ones whose arguments came to their end."""

    @property
    def over(self) -> bool:
        return self._one_call and self.whole_calls > 0

    def taken(self) -> list[Delta]:
        self._join()
        found, self._found = self._found, []
        return found

    def content(self, text: str) -> None:
        if text and not self.over and not self._goes_on(Content, text):
            self._add(Content(text))

    def reasoning(self, text: str) -> None:
        if text and not self.over and not self._goes_on(Reasoning, text):
            self._add(Reasoning(text))

    def call(self, name: str) -> None:
        if self.over:
            return
        self._add(CallStart(self.calls, self._call_id(self.calls), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        if text and not self.over and not self._goes_on(Arguments, text):
            self._add(Arguments(self.calls - 1, text))

    def _add(self, delta: Delta) -> None:
        self._join()
        self._found.append(delta)

    def _goes_on(self, kind: type[Delta], text: str) -> bool:
        """Whether the last one is of that kind; then this is more of it."""
        if not self._found or not isinstance(self._found[-1], kind):
            return False
        self._pieces.append(text)
        return True

    def _join(self) -> None:
        """Once for all of its pieces: thousands of them are a text read character by character."""
        if self._pieces:
            last = self._found[-1]
            assert not isinstance(last, CallStart), "it has no text"
            self._found[-1] = replace(last, text="".join((last.text, *self._pieces)))
            self._pieces = []

    def call_is_whole(self) -> None:
        if not self.over:
            self.whole_calls += 1
