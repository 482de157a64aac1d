"""From checked wire fields to `SamplingParams`: what a token is drawn from, and what is told of it.

Pure functions of the body and the tokenizer. Every id is checked here, from below, too: workers
take it for an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.services.router.openai.schema import ChatBody, CompletionBody, Sampled
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import MAX_SEED, SamplingParams


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids that a client may name, and how texts become ids."""

    tokenizer: TokenizerInfo
    size: int
    """Ids are below it."""

    def check(self, param: str, ids: Sequence[int]) -> None:
        """Raises `RequestError` for one that is none."""
        for at, id in enumerate(ids):
            if not 0 <= id < self.size:
                raise RequestError(
                    f"{param}: token ids go from 0 to {self.size - 1} (given: {_short(id)})",
                    param=f"{param}[{at}]",
                    code="invalid_value",
                )


def refusal(param: str, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code=code)


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else "a number of over 30 digits"


def sampling_params(body: Sampled, vocabulary: Vocabulary, drawn_seed: int) -> SamplingParams:
    """All but the token limits, which are each prompt's own. Raises `RequestError`."""
    vocabulary.check("stop_token_ids", body.stop_token_ids or ())
    vocabulary.check("allowed_token_ids", body.allowed_token_ids or ())
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=(drawn_seed if body.seed is None else body.seed) & MAX_SEED,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body, vocabulary),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=_bad_words(body, vocabulary),
        logprobs=_drawn_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
    )
    _check_drawable(sampling, bool(body.min_tokens), vocabulary.tokenizer)
    return sampling


def _logit_bias(body: Sampled, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    biases = {}
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and str(int(name[:20])) == name):
            raise refusal("logit_bias", f"{name[:64]!a} is no token id")
        id = int(name)
        if id >= vocabulary.size:
            raise refusal("logit_bias", f"token ids go from 0 to {vocabulary.size - 1}, not {id}")
        biases[id] = bias
    return tuple(sorted(biases.items()))


def _bad_words(body: Sampled, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text, and as it stands behind a space."""
    banned: list[tuple[int, ...]] = []
    for at, given in enumerate(body.bad_words or ()):
        word = given.lstrip(" ")
        if not word:
            raise refusal(f"bad_words[{at}]", "holds nothing but spaces")
        for text in (word, " " + word):
            ids = tuple(vocabulary.tokenizer.encode(text, False))
            # A token that the model lacks is never drawn; what ends in a banned end is banned.
            known = ids and max(ids) < vocabulary.size
            if known and not any(ids[-len(other) :] == other for other in banned):
                banned.append(ids)
    return tuple(banned)


def _check_drawable(sampling: SamplingParams, waits: bool, tokenizer: TokenizerInfo) -> None:
    """Something must be left to draw."""
    if not sampling.allowed_token_ids:
        return
    left = {*sampling.allowed_token_ids} - {ids[0] for ids in sampling.bad_words if len(ids) == 1}
    if waits:
        left -= {*sampling.stop_token_ids, *tokenizer.special.eos_token_ids}
    if not left:
        why = "bad_words bans, or which end the answer before min_tokens"
        raise refusal("allowed_token_ids", f"allows only tokens that {why}")


def told_logprobs(body: Sampled) -> int | None:
    """How many top logprobs the client is told with each token; None for no logprobs."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody) and body.logprobs:
        return body.top_logprobs or 0
    if isinstance(body, ChatBody) and body.top_logprobs:
        raise refusal("top_logprobs", "is only allowed together with logprobs: true")
    return None


def _drawn_logprobs(body: Sampled) -> int | None:
    told = told_logprobs(body)
    chooses = isinstance(body, CompletionBody) and (body.best_of or 1) > (body.n or 1)
    return 0 if told is None and chooses else told


def _prompt_logprobs(body: Sampled) -> int | None:
    """What the field of that name and `echo` with `logprobs` need."""
    echoed = told_logprobs(body) if isinstance(body, CompletionBody) and body.echo else None
    wanted = [top for top in (body.prompt_logprobs, echoed) if top is not None]
    return max(wanted, default=None)
