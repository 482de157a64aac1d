"""A text that is still arriving, read by parsers that can wait for more of it.

A parser is a generator: it yields where it needs text that is not there yet, and goes on when some
was added or the text has ended. So it reads like the format it parses, keeps its place in local
variables, and gives the same whatever pieces the text came in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]

BLANKS = " \t\r\n"


class Reader:
    """Positions count from the text's beginning. What lies before `drop`'s is gone."""

    def __init__(self) -> None:
        self._text = ""
        self._base = 0
        self.at = 0
        """The position that is read next."""
        self.ended = False

    def add(self, text: str) -> None:
        self._text += text

    @property
    def here(self) -> bool:
        """Whether the character at `at` has arrived."""
        return self.at - self._base < len(self._text)

    def drop(self) -> None:
        """Nobody will go back behind `at`. What is left is copied for it only when that is less
        than what goes: all copies together are no more than the text."""
        done = self.at - self._base
        if 2 * done >= len(self._text):
            self._text = self._text[done:]
            self._base = self.at

    def rest(self) -> str:
        """All that has arrived, and then it is read."""
        text = self._text[self.at - self._base :]
        self.at += len(text)
        self.drop()
        return text

    def since(self, start: int) -> str:
        return self._text[start - self._base : self.at - self._base]

    def peek(self) -> Wait[str]:
        """The next character, "" at the end of the text."""
        while not self.here:
            if self.ended:
                return ""
            yield
        return self._text[self.at - self._base]

    def skip_blanks(self) -> Wait[str]:
        """The first character that is none."""
        while True:
            character = yield from self.peek()
            if not character or character not in BLANKS:
                return character
            self.at += 1

    def take(self, word: str) -> Wait[bool]:
        """Whether it comes next, and then it is read; waits only while it still may."""
        start = self.at
        for wanted in word:
            if (yield from self.peek()) != wanted:
                self.at = start
                return False
            self.at += 1
        return True

    def seek(self, word: str, passed: Callable[[str], None]) -> Wait[bool]:
        """Go to where the word begins, or to the end; what is passed over is told as soon as it
        cannot be part of the word."""
        while True:
            self.drop()
            text, start = self._text, self.at - self._base
            upto = found = text.find(word, start)
            if found < 0:
                upto = len(text) - (0 if self.ended else _begun(text, start, word))
            self.at += upto - start
            if upto > start:
                passed(text[start:upto])
            if found >= 0:
                return True
            if self.ended:
                return False
            yield


def _begun(text: str, start: int, word: str) -> int:
    """The length of the longest end of `text`, from `start` on, that the word begins with."""
    for length in range(min(len(text) - start, len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
