"""All legs of one request as text: events in, deltas and ends out. No IO."""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.wording import Choice, Usage
from kvrelay.services.router.text import LegText
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.types import FinishReason, ValidRequest


class Step(NamedTuple):
    """What one event did to its leg."""

    text: str
    """May be empty: held back, or no text at all."""
    finish: FinishReason | None
    cut: bool
    """The leg ended here by a stop string; the cluster does not know that yet."""


class Transcript:
    """Stops, counts and keeps. Events of a leg that has ended are dropped and not counted."""

    def __init__(self, request: ValidRequest, tokenizer: TokenizerInfo) -> None:
        self._prompt_tokens = request.prompt_tokens
        self._completion_tokens = 0
        self.cached_tokens = 0
        """For `usage`; whoever ends the generation knows."""
        self._machines = [
            LegText(
                tokenizer.token_bytes,
                tokenizer.special_ids,
                request.stop,
                unsearched_tokens=leg.sampling.min_tokens,
            )
            for leg in request.legs
        ]
        self._texts: list[list[str]] = [[] for _ in request.legs]
        self._ends: dict[int, FinishReason] = {}

    def take(self, event: TokenEvent) -> Step:
        if event.leg in self._ends:
            return Step("", None, cut=False)
        self._completion_tokens += 1
        machine = self._machines[event.leg]
        finish = event.finish
        text = "" if finish is FinishReason.STOP else machine.feed(event.token)
        if finish is not None:
            text += machine.finish()
        if machine.stopped:
            finish = FinishReason.STOP
        if text:
            self._texts[event.leg].append(text)
        if finish is not None:
            self._ends[event.leg] = finish
        return Step(text, finish, cut=event.finish is None and machine.stopped)

    @property
    def complete(self) -> bool:
        return len(self._ends) == len(self._machines)

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self.cached_tokens)

    def choices(self) -> list[Choice]:
        """Only once `complete`."""
        return [Choice("".join(text), self._ends[leg]) for leg, text in enumerate(self._texts)]
