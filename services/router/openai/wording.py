"""What the two routes say differently about the same answer; one object for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from kvrelay.shared.types import FinishReason, Logprobs

Timing: TypeAlias = dict[str, float]
"""Milliseconds by name; empty where they are not asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens, with the one that ended a choice: EOS, a stop id, or of a stop string."""
    cached_tokens: int = 0
    """Of the prompts' tokens those that nobody had to compute."""

    def as_json(self) -> dict[str, int | dict[str, int]]:
        details = {"cached_tokens": self.cached_tokens}
        return {**self.so_far(), "prompt_tokens_details": details}

    def so_far(self) -> dict[str, int | dict[str, int]]:
        """While the answer runs: how much was cached is known when it has ended."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Told(NamedTuple):
    """One token that the client is told of."""

    token: int
    offset: int
    """Characters of its choice's text before it."""
    logprobs: Logprobs | None
    """None for the first token of a prompt, which nothing predicts, and if nobody asked."""


class Delta(NamedTuple):
    """A piece of one leg's answer. All of a leg, `joined`, is its whole answer."""

    text: str = ""
    tokens: tuple[Told, ...] = ()
    """Generated ones, each once, and with the text they begin in; those without text, as EOS, with
    what comes next. Empty unless logprobs or ids are to be told."""
    finish: FinishReason | None = None
    """Only in the last one of a leg, which has no text."""
    echoed: tuple[Told, ...] = ()
    """The prompt's, if it is echoed with logprobs; only in a leg's first."""
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    """In a leg's first: of prompt tokens 1, 2, ..., if they are to be told. None in the others."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """One for all of a leg's."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(told for delta in deltas for told in delta.tokens),
        finish=deltas[-1].finish,
        echoed=deltas[0].echoed,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


class Choice(NamedTuple):
    """One finished leg; its place in the answer is its index."""

    leg: int
    answer: Delta


class Wording(Protocol):
    """Bytes for the wire. Streams: all deltas of all legs, each leg's in order; then `last`."""

    def chunk(self, leg: int, delta: Delta, so_far: Usage | None = None) -> bytes:
        """`so_far` if every chunk is to tell it. May be empty: nothing to tell yet."""
        ...

    def last(self, usage: Usage | None, timing: Timing) -> bytes: ...

    def whole(self, choices: Sequence[Choice], usage: Usage, timing: Timing) -> bytes: ...
