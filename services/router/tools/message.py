"""One answer's text as deltas of its message: reasoning, content, calls."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from kvrelay.services.router.tools.deltas import Delta, Deltas
from kvrelay.services.router.tools.envelope import Names
from kvrelay.services.router.tools.forms import Form
from kvrelay.services.router.tools.reader import Reader, Wait


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags around a model's reasoning."""

    begin: str
    end: str


class MessageParser:
    """Feed text in order, then `finish`. Deltas do not depend on how the text was cut."""

    def __init__(
        self,
        form: Form,
        names: Set[str],
        call_id: Callable[[int], str],
        thinking: Thinking | None = None,
        *,
        begun: bool = False,
        one_call: bool = False,
    ) -> None:
        """`names` are those of the tools that were declared. `begun`: the prompt ends within the
        reasoning. `one_call`: the answer is over with its first whole call."""
        self._reader = Reader()
        self._out = Deltas(call_id, one_call)
        self._run = self._parse(form, Names(names, any=True), thinking, begun)
        self._running = True

    def feed(self, text: str) -> list[Delta]:
        self._reader.add(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        """What was held back: no more text comes."""
        self._reader.ended = True
        return self._go_on()

    @property
    def called(self) -> bool:
        """Whether calls were made, none of which was cut off."""
        return 0 < self._out.calls == self._out.whole_calls

    @property
    def over(self) -> bool:
        """There is a call, and only one is wanted: what else comes is not told."""
        return self._out.over

    def _go_on(self) -> list[Delta]:
        if self._running and not self.over:
            self._running = next(self._run, True) is None
        return self._out.taken()

    def _parse(
        self, form: Form, names: Names, thinking: Thinking | None, begun: bool
    ) -> Wait[None]:
        if thinking is not None:
            yield from _reasoning(self._reader, self._out, thinking, begun)
        yield from form(self._reader, self._out, names)


def _reasoning(reader: Reader, out: Deltas, tags: Thinking, begun: bool) -> Wait[None]:
    """Only an answer's beginning is reasoning; blanks inside of its tags' edges and behind it are
    the tags'."""
    start = reader.at
    yield from reader.skip_blanks()
    if not (yield from reader.take(tags.begin)) and not begun:
        reader.at = start
        return
    yield from reader.skip_blanks()
    reader.drop()
    if (yield from reader.seek(tags.end, out.reasoning)):
        yield from reader.take(tags.end)
        yield from reader.skip_blanks()
        reader.drop()
