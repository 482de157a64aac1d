"""The words every part shares: ids, sampling parameters, and a request that was validated.

Plain data only: nothing here imports more than the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
Incarnation = NewType("Incarnation", str)
"""32 hex digits drawn at each start of a worker or router; compared only for equality."""

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
"""Of the likeliest ids that are told with a token."""


class Role(StrEnum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(StrEnum):
    """Why a choice ended, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"


class EndReason(StrEnum):
    """Why a leg left a worker; every leg ends with exactly one of these."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class GrammarKind(StrEnum):
    """In which language a request says what its answer must be."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """One of the texts of a JSON list."""
    GRAMMAR = "grammar"
    """Lark as llguidance understands it, or GBNF."""
    CALLS = "calls"
    """Lark that the router wrote for tool calls. What a schema in it asks for and cannot be had is
    passed over where the tool is not strict."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be, as its request says it."""

    kind: GrammarKind
    text: str
    param: str
    """The field that says so."""
    around: str = ""
    """Lark in which `@content` is that; empty if the whole answer is."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The noise is a function of (seed, choice, token index) alone.

    `temperature` 0 means greedy. `top_k` 0 means off; `top_p` 1 and `min_p` 0 mean off.
    `stop_token_ids` end the choice like EOS does; `ignore_eos` switches EOS (not stop ids) off.
    Neither EOS nor stop ids can be drawn before `min_tokens` tokens exist.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both are subtracted from the logits of tokens that the answer has: once, and once each."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or answer have: positive ones are divided by it, others
    multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these ids, which are in ascending order."""
    allowed_token_ids: tuple[int, ...] = ()
    """No others may be drawn; empty is all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids whose last one may not be drawn right behind the others."""
    logprobs: int | None = None
    """How many of the likeliest ids are told with each token, besides its own; None tells none."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    grammar: str = ""
    """What the answer must be: a grammar as llguidance serialises it; empty is anything."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one position: of the model's own distribution, before
    temperature, filters, penalties, bias or grammar."""

    chosen: float
    rank: int
    """Of the chosen token: 1 is the likeliest."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), the likeliest first; of equal ones the lower id."""


@dataclass(frozen=True, slots=True)
class LegSpec:
    """All that one choice of one prompt needs to be computed anywhere: the unit workers see.

    A continuation is the same spec with the tokens the client has seen in `seen`: they are forced,
    never sampled again, and the next token has index `len(seen)`.
    """

    leg: str
    """`<request id>/<leg number>`: made by the router, unique in the cluster."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0
    seen: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Smaller is more urgent. The least urgent loses its memory first."""
    cache_salt: str = ""
    """KV is shared only among legs that have the same."""


@dataclass(frozen=True, slots=True)
class LegRef:
    """One attempt at one leg. A message about any other attempt or nonce is stale and dropped."""

    leg: str
    attempt: int
    nonce: int
    """A fresh random 48-bit number for each attempt; the high bits of its transfer tags."""

    @property
    def key(self) -> str:
        """As the rows of a step name it."""
        return f"{self.leg}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What of a chat answer's text is no content, and how it is told from it."""

    calls: str = "none"
    """The format in which this model calls tools, by name."""
    names: tuple[str, ...] = ()
    """Of the tools it may call."""
    one_call: bool = False
    short_ids: bool = False
    """Calls get ids of nine letters and digits."""
    thinking: tuple[str, str] | None = None
    """The tags around reasoning."""
    thinking_begun: bool = False
    """The prompt ends with the first of them."""
    text_ids: frozenset[int] = frozenset()
    """Control tokens that are text all the same: tags."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the client is told of an answer, and how: the router's alone, workers see none of it."""

    choices: int = 1
    """Answers to each prompt."""
    candidates: int = 1
    """Legs of each prompt, of which the likeliest `choices` are answered."""
    logprobs: int | None = None
    """As in `SamplingParams`, which may ask for more than is told."""
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    """The text of each prompt, told before its answers; empty when that is not asked for."""
    prompt_only: bool = False
    """The one token that must be drawn is neither told nor counted (`max_tokens` 0)."""
    include_stop: bool = False
    """What ended the answer, a stop string or token, is part of its text."""
    show_special: bool = False
    """Control tokens are text, too."""
    token_ids: bool = False
    continuous_usage: bool = False
    timing: bool = False
    """Where the time went is told with the answer."""
    message: MessageForm = MessageForm()


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A client's request after the one place that parses and checks it (`services.router`)."""

    request_id: str
    model: str
    legs: tuple[LegSpec, ...]
    """Prompt-major: leg `i * candidates + j` is candidate j of prompt i. Without a `best_of` above
    `n` that is also its `index` in the answer."""
    prompt_tokens: int
    """Summed over prompts, each counted once however many choices it has (as OpenAI counts)."""
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    """Its grammar is in the legs' sampling once it was checked."""
    stream: bool = False
    include_usage: bool = False
    chat: bool = False
    form: AnswerForm = AnswerForm()
    client_label: str = ""
    """The client's own X-Request-Id: a label for people, never a key."""
    received_ns: int = 0
    """Monotonic time at which its first byte was read; 0 when nobody noted it."""
    trace_headers: dict[str, str] = field(default_factory=dict)
    """W3C `traceparent`/`tracestate` of the caller, if any."""
