"""From checked wire models to a `ValidRequest`: the one place that tokenizes and counts.

Pure functions of the body, the model card, the request's origin and a drawn seed. They may take
long for a long text, so the caller chooses the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvrelay.services.router.conversation import conversation
from kvrelay.services.router.openai.schema import MAX_LEGS, ChatBody, CompletionBody, Sampled
from kvrelay.services.router.sampling import (
    Vocabulary,
    refusal,
    sampling_params,
    told_logprobs,
)
from kvrelay.services.router.structured import check_beside, constraint_of
from kvrelay.services.router.template import ChatTemplate
from kvrelay.services.router.tools.asked import asked_tools, with_tools
from kvrelay.services.router.tools.model import AUTO, NO_TOOLS, ModelTools, Parsers, model_tools
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import AnswerForm, LegSpec, SamplingParams, ValidRequest

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of /v1/completions."""
SURE_CHARACTERS = 4
"""A text with at most this many characters for each token of the context is tokenized as it is."""
PIECE_CHARACTERS = 1 << 15
CUT_TOKENS = 16
"""More tokens than cutting a text in two can add."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""Of one answer: each is some 60 bytes of it."""
MAX_LOGPROBS_KEPT = 1 << 22
"""While several choices are collected. That of one is as long as the context allows."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the edge knows of the model that this router serves."""

    names: tuple[str, ...]
    """Names a client may use; the first is the model's own."""
    tokenizer: TokenizerInfo
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids below it may be named by a client."""
    template: ChatTemplate | None
    created_s: int
    """Unix time, for /v1/models."""
    tools: ModelTools = NO_TOOLS
    max_output_tokens: int | None = None
    """Most tokens that one answer may be asked to have; None: as many as the context holds."""

    def brief(self) -> ModelCard:
        """The same for the event loop: what would take long there raises `TakesLong`."""
        if self.template is None:
            return self
        return replace(self, template=self.template.brief())

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.vocab_size)


def model_card(
    names: Sequence[str],
    tokenizer: TokenizerInfo,
    max_model_len: int,
    created_s: int,
    vocab: int | None = None,
    parsers: Parsers = AUTO,
) -> ModelCard:
    """Compiles the chat template and tries it. Raises `ModelError` when it cannot be compiled.

    `vocab`: rows of the model's embedding, which may be fewer than the tokenizer's ids.
    """
    special = tokenizer.special
    source, bos, eos = special.chat_template, special.bos_token or "", special.eos_token or ""
    template = None if source is None else ChatTemplate(source, bos, eos)
    return ModelCard(
        names=tuple(names),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=min(tokenizer.vocab_size, vocab or tokenizer.vocab_size),
        template=template,
        created_s=created_s,
        tools=NO_TOOLS if template is None else _tools(template, tokenizer, parsers),
    )


def _tools(template: ChatTemplate, tokenizer: TokenizerInfo, parsers: Parsers) -> ModelTools:
    def render(messages: Sequence[Any], tools: Sequence[Any]) -> str:
        return template.render(messages, tools=tools)

    ids = sorted(tokenizer.special_ids)
    control = {tokenizer.token_bytes(id).decode("utf-8", "replace"): id for id in ids}
    return model_tools(tokenizer.special.chat_template or "", render, control, parsers)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, beside its body."""

    request_id: str
    seed: int
    """Drawn for this request; used when the client gives none."""
    received_ns: int = 0
    """Monotonic time at which the request's head had been read."""
    client_label: str = ""
    timing: bool = False
    """It asks for where the time went."""
    trace_headers: dict[str, str] = field(default_factory=dict)


def valid_completion(body: CompletionBody, card: ModelCard, origin: Origin) -> ValidRequest:
    """Raises `RequestError`."""
    _check_model(body, card)
    if body.suffix:
        raise refusal(
            "suffix",
            f"the model {card.names[0]!r} has no fill-in-the-middle, which it needs",
            code="unsupported_parameter",
        )
    prompts = [
        _fitting(card, prompt, "prompt", body, add_special=True)
        if isinstance(prompt, str)
        else _known_ids(card, prompt, body)
        for prompt in body.prompt
    ]
    return _request(body, card, origin, prompts)


def valid_chat(body: ChatBody, card: ModelCard, origin: Origin) -> ValidRequest:
    """Renders the template, with control tokens that people typed kept plain text.

    Raises `RequestError`.
    """
    _check_model(body, card)
    if card.template is None:
        raise RequestError(
            f"The model {card.names[0]!r} has no chat template; use /v1/completions",
            param="messages",
            code="unsupported_parameter",
        )
    asked = asked_tools(body.tools, body.tool_choice, body.parallel_tool_calls, card.tools)
    text = conversation(body, card.template, card.tokenizer, card.tools, asked.tools)
    prompt = _fitting(card, text, "messages", body, add_special=False)
    request = _request(body, card, origin, [prompt])
    return with_tools(request, asked, card.tools, text)


def _check_model(body: Sampled, card: ModelCard) -> None:
    if body.model not in card.names:
        raise model_not_found(body.model)


def model_not_found(name: str) -> RequestError:
    shown = name if len(name) <= 128 else name[:125] + "..."
    return RequestError(
        f"The model {shown!a} does not exist",
        param="model",
        code="model_not_found",
        status=404,
    )


def _fitting(
    card: ModelCard, text: str, param: str, body: Sampled, *, add_special: bool
) -> tuple[int, ...]:
    """The ids of a text; one that is far too long is refused before all of it is tokenized."""
    encode = card.tokenizer.encode if add_special else card.tokenizer.encode_guarded
    kept = _kept_tokens(card, body)
    if kept is not None:
        text = text[-_characters_of(kept, card.tokenizer) :]
    elif len(text) > SURE_CHARACTERS * card.max_model_len:
        least = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            least += max(0, len(encode(piece, False)) - CUT_TOKENS)
            if least >= card.max_model_len:
                raise _too_long(card, f"at least {least}", param)
    ids = tuple(encode(text, add_special))[-(kept or 0) :]
    if not ids:
        raise refusal(param, "there is no token in it")
    if len(ids) >= card.max_model_len:  # here, before others of the same body are tokenized
        raise _too_long(card, str(len(ids)), param)
    if card.vocab_size < card.tokenizer.vocab_size and max(ids) >= card.vocab_size:
        token = card.tokenizer.token_bytes(max(ids)).decode("utf-8", "replace")
        raise refusal(param, f"the model has no {token!a}, a token that only its tokenizer knows")
    return ids


def _known_ids(card: ModelCard, prompt: tuple[int, ...], body: Sampled) -> tuple[int, ...]:
    card.vocabulary.check("prompt", prompt)
    return prompt[-(_kept_tokens(card, body) or 0) :]


def _kept_tokens(card: ModelCard, body: Sampled) -> int | None:
    """How many of a prompt's last tokens are read; None for all."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return None
    if kept == 0 or kept > card.max_model_len:
        limits = f"must be -1, or 1 to {card.max_model_len} (given: {kept})"
        raise refusal("truncate_prompt_tokens", limits)
    if kept == -1:
        return max(1, card.max_model_len - max(1, _answer_tokens(body) or 1))
    return kept


def _characters_of(tokens: int, tokenizer: TokenizerInfo) -> int:
    """The end of a text with so many characters has more tokens than that, and the last of them do
    not depend on what is before it. A guarded text has up to three times the characters."""
    return 3 * (tokens + CUT_TOKENS) * tokenizer.longest_token_bytes


def _request(
    body: Sampled, card: ModelCard, origin: Origin, prompts: Sequence[tuple[int, ...]]
) -> ValidRequest:
    form = _form(body, card, prompts)
    _check_together(body, len(prompts), form)
    sampling = sampling_params(body, card.vocabulary, origin.seed)
    constraint = constraint_of(body)
    legs: list[LegSpec] = []
    for prompt in prompts:
        limited = _limited(sampling, body, card, len(prompt))
        if constraint is not None:
            check_beside(constraint, limited)
        others = replace(limited, prompt_logprobs=None)  # they are told what the first is
        for choice in range(form.candidates):
            legs.append(
                LegSpec(
                    leg=f"{origin.request_id}/{len(legs)}",
                    prompt=prompt,
                    sampling=limited if choice == 0 else others,
                    choice=choice,
                    eos_token_ids=card.tokenizer.special.eos_token_ids,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                )
            )
    _check_told(legs, form, bool(body.stream))
    options = body.stream_options
    return ValidRequest(
        request_id=origin.request_id,
        model=card.names[0],
        legs=tuple(legs),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        stop=tuple(body.stop or ()),
        constraint=constraint,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        chat=isinstance(body, ChatBody),
        form=replace(form, timing=origin.timing),
        client_label=origin.client_label,
        received_ns=origin.received_ns,
        trace_headers=origin.trace_headers,
    )


def _form(body: Sampled, card: ModelCard, prompts: Sequence[tuple[int, ...]]) -> AnswerForm:
    options = body.stream_options
    choices = candidates = body.n or 1
    echo: tuple[str, ...] = ()
    if isinstance(body, CompletionBody):
        candidates = body.best_of or choices
        if body.echo:
            echo = tuple(map(partial(_echo, body, card), body.prompt, prompts))
    return AnswerForm(
        choices=choices,
        candidates=candidates,
        logprobs=told_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        echo=echo,
        prompt_only=_asked_tokens(body) == 0,
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        token_ids=bool(body.return_token_ids),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )


def _echo(
    body: Sampled, card: ModelCard, given: str | tuple[int, ...], ids: tuple[int, ...]
) -> str:
    """A text as it was given, unless only its end is read."""
    if isinstance(given, str) and body.truncate_prompt_tokens is None:
        return given
    hidden = frozenset() if body.skip_special_tokens is False else card.tokenizer.special_ids
    shown = (card.tokenizer.token_bytes(id) for id in ids if id not in hidden)
    return b"".join(shown).decode("utf-8", "replace")


def _check_together(body: Sampled, prompts: int, form: AnswerForm) -> None:
    """Rules about more than one field."""
    named = "best_of" if form.candidates > form.choices else "n"
    if prompts * form.candidates > MAX_LEGS:
        given = prompts * form.candidates
        raise refusal(named, f"prompts times {named} must be at most {MAX_LEGS}, not {given}")
    if form.candidates < form.choices:
        raise refusal("best_of", f"{form.candidates} is less than n, {form.choices}")
    if form.candidates > form.choices and body.stream:
        raise refusal("best_of", "is only allowed without stream: true, unless it is equal to n")
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options", "is only allowed together with stream: true")
    if form.prompt_only and not form.echo:
        raise refusal("max_tokens", "must be at least 1 (given: 0); 0 is allowed with echo: true")
    asked = _answer_tokens(body)
    if body.min_tokens and asked is not None and body.min_tokens > asked:
        raise refusal("min_tokens", f"{body.min_tokens} is more than max_tokens, {asked}")


def _check_told(legs: Sequence[LegSpec], form: AnswerForm, stream: bool) -> None:
    """What is told of tokens is bounded: it is many times what the tokens themselves are."""
    sampling = legs[0].sampling
    if sampling.prompt_logprobs is not None:
        named = "logprobs" if form.prompt_logprobs is None else "prompt_logprobs"
        told = (sampling.prompt_logprobs + 1) * sum(len(leg.prompt) for leg in legs)
        if told > MAX_PROMPT_LOGPROBS:
            raise refusal(
                named,
                f"at most {MAX_PROMPT_LOGPROBS} of all prompts' tokens together, not {told}: ask "
                "for fewer, or send fewer prompts at once",
            )
    if sampling.logprobs is not None and len(legs) > 1 and not stream:
        told = (sampling.logprobs + 1) * sum(leg.sampling.max_tokens for leg in legs)
        if told > MAX_LOGPROBS_KEPT:
            raise refusal(
                "best_of" if form.logprobs is None else "logprobs",
                f"at most {MAX_LOGPROBS_KEPT} of all answers' tokens together, not {told}: ask for "
                "fewer, a smaller max_tokens, or a stream",
            )


def _answer_tokens(body: Sampled) -> int | None:
    """`max_tokens` as asked for or OpenAI's own; None for all that fit."""
    asked = _asked_tokens(body)
    chat = isinstance(body, ChatBody)
    return DEFAULT_COMPLETION_TOKENS if asked is None and not chat else asked


def _asked_tokens(body: Sampled) -> int | None:
    if not isinstance(body, ChatBody) or body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise refusal("max_tokens", "differs from max_completion_tokens; give only one of them")
    return body.max_completion_tokens


def _asked_name(body: Sampled) -> str:
    named = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if named else "max_tokens"


def _limited(
    sampling: SamplingParams, body: Sampled, card: ModelCard, prompt_tokens: int
) -> SamplingParams:
    """With the token limits that this prompt leaves."""
    room = card.max_model_len - prompt_tokens
    if room < 1:
        chat = isinstance(body, ChatBody)
        raise _too_long(card, str(prompt_tokens), "messages" if chat else "prompt")
    asked = _answer_tokens(body)
    if asked is not None and asked > card.max_model_len:
        limit = f"this model's maximum context length is {card.max_model_len} tokens"
        raise refusal(_asked_name(body), f"{asked} is too large: {limit}")
    most = card.max_output_tokens
    if most is not None:
        given = _asked_tokens(body)
        if given is not None and given > most:
            problem = f"{given} is too large: this server gives up to {most}"
            raise refusal(_asked_name(body), problem)
        room = min(room, most)
    # Of a prompt alone one token is drawn and not told: it is what makes the prompt be read.
    max_tokens = room if asked is None else min(max(asked, 1), room)
    min_tokens = min(body.min_tokens or 0, max_tokens)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _too_long(card: ModelCard, tokens: str, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {card.max_model_len} tokens, and an answer needs "
        f"at least one of them. However, your prompt has {tokens} tokens. Please shorten it.",
        param=param,
        code="context_length_exceeded",
    )
