"""What the two routes say differently about the same answer; one object for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.shared.types import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens, with the one that ended a choice: EOS, a stop id, or of a stop string."""
    cached_tokens: int = 0
    """Of the prompts' tokens those that nobody had to compute."""

    def as_json(self) -> dict[str, int | dict[str, int]]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished leg; its place in the answer is its index."""

    text: str
    finish: FinishReason


class Wording(Protocol):
    """Bytes for the wire. Streams: any number of `delta`, one `finish` for each leg, `usage`."""

    def delta(self, leg: int, text: str) -> bytes: ...

    def finish(self, leg: int, reason: FinishReason) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...
