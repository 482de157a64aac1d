"""All legs of one request as text: events in, deltas out. No IO."""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.legs import Leg
from kvrelay.services.router.openai.wording import Choice, Delta, Usage, joined
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.types import ValidRequest


class Step(NamedTuple):
    """What one event did to its leg."""

    deltas: tuple[Delta, ...]
    """Often one; none while text is held back."""
    cut: bool
    """The leg ended here by a stop string; the cluster does not know that yet."""


class Transcript:
    """Stops, counts and keeps. Events of a leg that has ended are dropped and not counted."""

    def __init__(self, request: ValidRequest, tokenizer: TokenizerInfo) -> None:
        self._request = request
        self._completion_tokens = 0
        self.cached_tokens = 0
        """For `usage`; whoever ends the generation knows."""
        self._legs = [Leg(request, leg, tokenizer) for leg in range(len(request.legs))]
        self._open = len(self._legs)
        self._deltas: list[list[Delta]] = [[] for _ in self._legs]
        """Of a stream none: they are with the client."""

    def take(self, event: TokenEvent) -> Step:
        """Raises `WorkerFailed` when the event lacks logprobs that were asked for."""
        leg = self._legs[event.leg]
        if leg.ended:
            return Step((), cut=False)
        deltas = leg.take(event)
        self._completion_tokens += not self._request.form.prompt_only
        self._open -= leg.ended
        if not self._request.stream:
            self._deltas[event.leg] += deltas
        return Step(deltas, cut=leg.ended and event.finish is None)

    @property
    def complete(self) -> bool:
        return self._open == 0

    @property
    def usage(self) -> Usage:
        return Usage(self._request.prompt_tokens, self._completion_tokens, self.cached_tokens)

    def choices(self) -> list[Choice]:
        """Of a request that is no stream, once `complete`."""
        form = self._request.form
        chosen: list[int] = []
        for first in range(0, len(self._legs), form.candidates):
            legs = range(first, first + form.candidates)
            if form.choices < form.candidates:
                best = sorted(legs, key=lambda leg: -self._legs[leg].logprob)
                chosen += best[: form.choices]
            else:
                chosen += legs
        return [Choice(leg, joined(self._deltas[leg])) for leg in chosen]
