"""What a worker tells of a prompt, told with each choice though it was computed with one.

Logprobs of a prompt need all of it computed, whatever is cached. So only the first choice asks for
them: the others find its blocks in the cache. What they say before that is known is kept until it
is, for it is told with the first token of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.types import LegSpec, Logprobs


class PromptsTold:
    def __init__(self, legs: Sequence[LegSpec]) -> None:
        self._asks = legs[0].sampling.prompt_logprobs is not None
        self._first = [number - leg.choice for number, leg in enumerate(legs)]
        """By leg: the first choice of its prompt."""
        self._told: dict[int, tuple[Logprobs, ...]] = {}
        self._kept: dict[int, list[TokenEvent]] = {}
        """By first choice: what the others have said without it, in the order of its coming."""

    def take(self, event: TokenEvent) -> list[TokenEvent]:
        """The events that can be passed on now that this one is here."""
        if not self._asks:
            return [event]
        first = self._first[event.leg]
        if event.leg == first:
            if event.index > 0:
                return [event]
            self._told[first] = event.prompt_logprobs
            return [event, *map(self._with_prompt, self._kept.pop(first, ()))]
        if first not in self._told:
            self._kept.setdefault(first, []).append(event)
            return []
        return [self._with_prompt(event)]

    def _with_prompt(self, event: TokenEvent) -> TokenEvent:
        if event.index > 0:
            return event
        return replace(event, prompt_logprobs=self._told[self._first[event.leg]])
