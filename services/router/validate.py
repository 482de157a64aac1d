"""From checked wire models to a `ValidRequest`: the one place that tokenizes and counts.

Pure functions of the body, the model card, the request's origin and a drawn seed. They may take
long for a long text, so the caller chooses the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.services.router.openai.schema import MAX_LEGS, ChatBody, CompletionBody, Sampled
from kvrelay.services.router.template import ChatTemplate, Message
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import MAX_SEED, LegSpec, SamplingParams, ValidRequest

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of /v1/completions."""
SURE_CHARACTERS = 4
"""A text with at most this many characters for each token of the context is tokenized as it is."""
PIECE_CHARACTERS = 1 << 15
CUT_TOKENS = 16
"""More tokens than cutting a text in two can add."""


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


def model_card(
    names: Sequence[str],
    tokenizer: TokenizerInfo,
    max_model_len: int,
    created_s: int,
    vocab: int | None = None,
) -> ModelCard:
    """Compiles the chat template. Raises `ModelError` when it cannot be.

    `vocab`: rows of the model's embedding, which may be fewer than the tokenizer's ids.
    """
    special = tokenizer.special
    source, bos, eos = special.chat_template, special.bos_token or "", special.eos_token or ""
    return ModelCard(
        names=tuple(names),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=min(tokenizer.vocab_size, vocab or tokenizer.vocab_size),
        template=None if source is None else ChatTemplate(source, bos, eos),
        created_s=created_s,
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, beside its body."""

    request_id: str
    seed: int
    """Drawn for this request; used when the client gives none."""
    received_ns: int = 0
    """Monotonic time at which the request's head had been read."""
    client_label: str = ""
    trace_headers: dict[str, str] = field(default_factory=dict)


def valid_completion(body: CompletionBody, card: ModelCard, origin: Origin) -> ValidRequest:
    """Raises `RequestError`."""
    _check_model(body, card)
    prompts = [
        _fitting(card, prompt, "prompt", add_special=True)
        if isinstance(prompt, str)
        else _known_ids(card, prompt)
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
    text = card.template.render(_guarded(body, card.template, card.tokenizer))
    return _request(body, card, origin, [_fitting(card, text, "messages", add_special=False)])


def _guarded(body: ChatBody, template: ChatTemplate, tokenizer: TokenizerInfo) -> list[Message]:
    messages: list[Message] = []
    for given in body.messages:
        renamed = given.role == "developer" and not template.knows_developer
        role = "system" if renamed else given.role
        message = Message(role=role, content=tokenizer.guard(given.content))
        if given.name is not None:
            message["name"] = tokenizer.guard(given.name)
        if given.tool_call_id is not None:
            message["tool_call_id"] = tokenizer.guard(given.tool_call_id)
        messages.append(message)
    return messages


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


def _fitting(card: ModelCard, text: str, param: str, *, add_special: bool) -> tuple[int, ...]:
    """The ids of a text; one that is far too long is refused before all of it is tokenized."""
    encode = card.tokenizer.encode if add_special else card.tokenizer.encode_guarded
    if len(text) > SURE_CHARACTERS * card.max_model_len:
        least = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            least += max(0, len(encode(piece, False)) - CUT_TOKENS)
            if least >= card.max_model_len:
                raise _too_long(card, f"at least {least}", param)
    ids = tuple(encode(text, add_special))
    if not ids:
        raise _refusal(param, "there is no token in it")
    if card.vocab_size < card.tokenizer.vocab_size and max(ids) >= card.vocab_size:
        token = card.tokenizer.token_bytes(max(ids)).decode("utf-8", "replace")
        raise _refusal(param, f"the model has no {token!a}, a token that only its tokenizer knows")
    return ids


def _known_ids(card: ModelCard, prompt: tuple[int, ...]) -> tuple[int, ...]:
    _check_ids(card, "prompt", prompt)
    return prompt


def _check_ids(card: ModelCard, param: str, ids: Sequence[int]) -> None:
    for at, id in enumerate(ids):
        if not 0 <= id < card.vocab_size:
            raise RequestError(
                f"{param}: token ids go from 0 to {card.vocab_size - 1} (given: {_short(id)})",
                param=f"{param}[{at}]",
                code="invalid_value",
            )


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else "a number of over 30 digits"


def _request(
    body: Sampled, card: ModelCard, origin: Origin, prompts: Sequence[tuple[int, ...]]
) -> ValidRequest:
    chat = isinstance(body, ChatBody)
    n = body.n or 1
    _check_together(body, len(prompts) * n)
    _check_ids(card, "stop_token_ids", body.stop_token_ids or ())
    legs: list[LegSpec] = []
    for prompt in prompts:
        sampling = _sampling(body, card, origin, len(prompt))
        for choice in range(n):
            legs.append(
                LegSpec(
                    leg=f"{origin.request_id}/{len(legs)}",
                    prompt=prompt,
                    sampling=sampling,
                    choice=choice,
                    eos_token_ids=card.tokenizer.special.eos_token_ids,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                )
            )
    options = body.stream_options
    return ValidRequest(
        request_id=origin.request_id,
        model=card.names[0],
        legs=tuple(legs),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        stop=tuple(body.stop or ()),
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        chat=chat,
        client_label=origin.client_label,
        received_ns=origin.received_ns,
        trace_headers=origin.trace_headers,
    )


def _check_together(body: Sampled, legs: int) -> None:
    """Rules about more than one field."""
    if legs > MAX_LEGS:
        raise _refusal("n", f"prompts times n must be at most {MAX_LEGS}, not {legs}")
    if body.stream_options is not None and not body.stream:
        raise _refusal("stream_options", "is only allowed together with stream: true")
    asked = _asked_tokens(body)
    if asked is None and not isinstance(body, ChatBody):
        asked = DEFAULT_COMPLETION_TOKENS
    if body.min_tokens and asked is not None and body.min_tokens > asked:
        raise _refusal("min_tokens", f"{body.min_tokens} is more than max_tokens, {asked}")


def _asked_tokens(body: Sampled) -> int | None:
    if not isinstance(body, ChatBody) or body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise _refusal("max_tokens", "differs from max_completion_tokens; give only one of them")
    return body.max_completion_tokens


def _asked_name(body: Sampled) -> str:
    named = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if named else "max_tokens"


def _sampling(body: Sampled, card: ModelCard, origin: Origin, prompt_tokens: int) -> SamplingParams:
    chat = isinstance(body, ChatBody)
    room = card.max_model_len - prompt_tokens
    if room < 1:
        raise _too_long(card, str(prompt_tokens), "messages" if chat else "prompt")
    asked = _asked_tokens(body)
    if asked is not None and asked > card.max_model_len:
        limit = f"this model's maximum context length is {card.max_model_len} tokens"
        raise _refusal(_asked_name(body), f"{asked} is too large: {limit}")
    max_tokens = min(asked or (room if chat else DEFAULT_COMPLETION_TOKENS), room)
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=(origin.seed if body.seed is None else body.seed) & MAX_SEED,
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _too_long(card: ModelCard, tokens: str, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {card.max_model_len} tokens, and an answer needs "
        f"at least one of them. However, your prompt has {tokens} tokens. Please shorten it.",
        param=param,
        code="context_length_exceeded",
    )
