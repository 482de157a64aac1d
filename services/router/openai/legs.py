"""One leg of a request: its tokens in, text and what is told of its tokens out. Pure."""

from __future__ import annotations

from collections import deque

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.wording import Delta, Told
from kvrelay.services.router.text import LegText
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.errors import WorkerFailed
from kvrelay.shared.types import FinishReason, Logprobs, ValidRequest

LEAST_LOGPROB = -9999.0
"""What a client is told instead of minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    """NaN becomes the least one, too."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


class Leg:
    """Take each event once and in order. A token is told with the text that it begins in, so none
    is told before its text, twice or never."""

    def __init__(self, request: ValidRequest, number: int, tokenizer: TokenizerInfo) -> None:
        form = request.form
        self._form = form
        self._spec = request.legs[number]
        first = request.legs[number - self._spec.choice]
        self._prompt_asked = first.sampling.prompt_logprobs is not None
        self._tokenizer = tokenizer
        self._echo = form.echo[number // form.candidates] if form.echo else ""
        self._machine = LegText(
            tokenizer.token_bytes,
            frozenset() if form.show_special else tokenizer.special_ids - form.message.text_ids,
            request.stop,
            unsearched_tokens=self._spec.sampling.min_tokens,
            include_stop=form.include_stop,
        )
        self._tells = form.logprobs is not None or form.token_ids
        sampling = self._spec.sampling
        self._enders = {*self._spec.eos_token_ids, *sampling.stop_token_ids}
        """Ids that are no text as the last ones; with a grammar others end an answer, too."""
        self._shown = 0
        """Characters in deltas, the echoed prompt's included."""
        self._waiting: deque[Told] = deque()
        self._begun = False
        self._prompt_logprobs: tuple[Logprobs, ...] | None = None
        """For the first delta."""
        self.logprob = 0.0
        """Of all tokens together, if the request needs it."""
        self.ended = False

    def take(self, event: TokenEvent) -> tuple[Delta, ...]:
        """Raises `WorkerFailed` when the event lacks logprobs that were asked for."""
        text = ""
        echoed: tuple[Told, ...] = ()
        if not self._begun:
            text, echoed = self._begin(event)
        finish: FinishReason | None = FinishReason.LENGTH
        if not self._form.prompt_only:
            self._note(event)
            text += self._read(event)
            finish = FinishReason.STOP if self._machine.stopped else event.finish
        self._shown += len(text)
        deltas = []
        if text or echoed:
            deltas.append(self._delta(Delta(text, self._appeared(), echoed=echoed)))
        if finish is not None:
            self.ended = True
            deltas.append(self._delta(Delta("", self._left(), finish)))
        return tuple(deltas)

    def _begin(self, event: TokenEvent) -> tuple[str, tuple[Told, ...]]:
        self._begun = True
        logprobs, prompt = event.prompt_logprobs, self._spec.prompt
        if self._prompt_asked and len(logprobs) != len(prompt) - 1:
            raise WorkerFailed(
                f"{len(logprobs)} logprobs of a prompt of {len(prompt)} tokens came from a worker"
            )
        self._prompt_logprobs = () if self._form.prompt_logprobs is None else logprobs
        if not self._form.echo or self._form.logprobs is None:
            return self._echo, ()
        offsets = prompt_offsets(prompt, self._echo, self._tokenizer)
        told = map(Told, prompt, offsets, (None, *logprobs))
        return self._echo, tuple(told)

    def _note(self, event: TokenEvent) -> None:
        if self._spec.sampling.logprobs is not None:
            if event.logprobs is None:
                raise WorkerFailed("a token without logprobs came from a worker")
            self.logprob += finite(event.logprobs.chosen)
        if self._tells:
            offset = len(self._echo) + self._machine.characters
            self._waiting.append(Told(event.token, offset, event.logprobs))

    def _read(self, event: TokenEvent) -> str:
        """The text that became certain."""
        ends_it = event.finish is FinishReason.STOP and event.token in self._enders
        shown = self._form.include_stop or not ends_it
        text = self._machine.feed(event.token) if shown else ""
        return text if event.finish is None else text + self._machine.finish()

    def _appeared(self) -> tuple[Told, ...]:
        if not self._waiting:
            return ()
        appeared = []
        while self._waiting and self._waiting[0].offset < self._shown:
            appeared.append(self._waiting.popleft())
        return tuple(appeared)

    def _left(self) -> tuple[Told, ...]:
        """No more text comes: those of the stop, and others without text."""
        left = [told._replace(offset=min(told.offset, self._shown)) for told in self._waiting]
        self._waiting.clear()
        return tuple(left)

    def _delta(self, delta: Delta) -> Delta:
        if self._prompt_logprobs is None:
            return delta
        first, self._prompt_logprobs = self._prompt_logprobs, None
        return delta._replace(prompt_logprobs=first)


def prompt_offsets(prompt: tuple[int, ...], text: str, tokenizer: TokenizerInfo) -> list[int]:
    """Where in `text` each token of a prompt begins.

    Tokens may spell more than the text has at its front, such as BOS or the space that
    SentencePiece puts there: those begin where it begins.
    """
    machine = LegText(tokenizer.token_bytes, frozenset())
    starts = []
    for token in prompt:
        starts.append(machine.characters)
        machine.feed(token)
    machine.finish()
    extra = machine.characters - len(text)
    return [min(max(0, start - extra), len(text)) for start in starts]
