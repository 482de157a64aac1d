"""What a leg's parameters and tokens do to its next draw, beside the filters of the sampler.

All of it is a function of the prompt and the tokens so far, so a continuation goes on exactly. Legs
that ask for nothing of it have no steering. The others count their tokens once, as they come.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrelay.shared.sampling.edits import Edits, Mask, mask_of
from kvrelay.shared.types import LegSpec, SamplingParams


class Steering:
    """Of one leg. It is asked with all of the leg's tokens, of which there are only ever more."""

    def __init__(self, spec: LegSpec, vocab: int) -> None:
        sampling = spec.sampling
        self._prompt = len(spec.prompt)
        # The prompt counts for the penalty of repetitions alone.
        self._counted = 0 if sampling.repetition_penalty != 1.0 else self._prompt
        self._counts = _has_penalties(sampling)
        self._place: dict[int, int] = {}
        """Of each known id, where `Edits.known` has its count."""
        self._sampling = sampling
        self._vocab = vocab
        self._edits: Edits | None = None
        self._allowed: tuple[Mask, ...] = ()
        self._bad_ends: dict[int, list[tuple[int, ...]]] = {}
        """Bad words of several ids, by the last one but one."""
        self._bad_ids = tuple(word[0] for word in sampling.bad_words if len(word) == 1)
        for word in sampling.bad_words:
            if len(word) > 1:
                self._bad_ends.setdefault(word[-2], []).append(word)

    def banned(self, known: Sequence[int]) -> tuple[int, ...]:
        """Ids that would end a bad word."""
        banned = self._bad_ids
        for word in self._bad_ends.get(known[-1], ()):
            begin = word[:-1]
            if tuple(known[-len(begin) :]) == begin:
                banned += (word[-1],)
        return banned

    def edits(self, known: Sequence[int]) -> Edits | None:
        """The same object each time, brought up to date; None if there is nothing to edit."""
        if self._edits is None:
            self._edits = self._begin()
        edits = self._edits
        if self._counts:
            self._count(edits, known)
        nothing = not (self._counts or edits.biased or edits.masks)
        return None if nothing else edits

    def _begin(self) -> Edits:
        """Only once the leg draws: many only wait."""
        how = self._sampling
        if how.allowed_token_ids:
            self._allowed = (mask_of(how.allowed_token_ids, self._vocab),)
        return Edits(
            repetition=how.repetition_penalty,
            presence=how.presence_penalty,
            frequency=how.frequency_penalty,
            biased=array("i", [token for token, _ in how.logit_bias]),
            bias=array("d", [bias for _, bias in how.logit_bias]),
            masks=self._allowed,
        )

    def _count(self, edits: Edits, known: Sequence[int]) -> None:
        if self._counted < self._prompt:
            self._enter(edits, known[: self._prompt])
        for token in known[self._counted :]:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(edits.known) + 1
                edits.known.extend((token, 0))
            edits.known[place] += 1
        self._counted = len(known)

    def _enter(self, edits: Edits, prompt: Sequence[int]) -> None:
        """All at once: token by token a long prompt takes tens of milliseconds."""
        ids = list(dict.fromkeys(prompt))
        edits.known = array("i", bytes(2 * 4 * len(ids)))
        edits.known[0::2] = array("i", ids)
        self._place = dict(zip(ids, range(1, 2 * len(ids), 2), strict=True))
        self._counted = self._prompt


def steering_of(spec: LegSpec, vocab: int) -> Steering | None:
    """None for a leg that asks for nothing of it."""
    how = spec.sampling
    if not (_has_penalties(how) or how.logit_bias or how.allowed_token_ids or how.bad_words):
        return None
    return Steering(spec, vocab)


def _has_penalties(how: SamplingParams) -> bool:
    return (how.repetition_penalty, how.presence_penalty, how.frequency_penalty) != (1.0, 0.0, 0.0)
