"""The OpenAI API's request bodies as pydantic models, and the tables of what else is known.

A field is supported, ignored on purpose, known but not supported (accepted only with a value that
asks for nothing), or unknown. The last two are a 400 that names the field: nothing is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kvrelay.services.router.openai.structured_schema import (
    Choices,
    GrammarText,
    Regex,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from kvrelay.services.router.openai.tool_schema import CallId, GivenCalls, ToolChoice, Tools

MAX_LEGS = 128
"""Most answers of one request: prompts times n."""
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SALT_CHARACTERS = 128
MAX_BIASED_IDS = 1024
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_TEMPLATE_VARIABLES = 64
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1

Ids: TypeAlias = tuple[int, ...]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count = Annotated[int, Field(ge=1, le=MAX_INT64)]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _prompts(value: object) -> tuple[str | Ids, ...]:
    """OpenAI's four forms as a tuple of prompts: a text, texts, token ids, lists of token ids."""
    items = value if isinstance(value, list) else [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        items = [value]
    if not 1 <= len(items) <= MAX_LEGS:
        raise _invalid(f"must hold 1 to {MAX_LEGS} prompts, not {len(items)}")
    return tuple(_prompt(item) for item in items)


def _prompt(item: object) -> str | Ids:
    if isinstance(item, list) and all(type(id) is int for id in item):
        item = tuple(item)
    if not isinstance(item, str | tuple):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, token ids, or lists of token ids"
        )
    if not item:
        raise _invalid("must not be empty")
    return item


def _content(value: object) -> str | None:
    """The text of a message: a string, or text parts, which are joined by a line break."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    if not value:
        raise _invalid("must have at least one part")
    return "\n".join(_part(part) for part in value)


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _invalid(f"has a part of type {shown(kind)}; only 'text' is supported")
    if not isinstance(part, dict) or set(part) != {"type", "text"}:
        raise _invalid("has a text part with other fields than 'type' and 'text'")
    if not isinstance(part["text"], str):
        raise PydanticCustomError("content_type", "has a text part whose 'text' is no string")
    return part["text"]


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{complaint}", {"complaint": message})


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _or_none(value: object) -> object:
    """`false` is what the chat route calls no logprobs."""
    return None if value is False else value


def shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value if len(value) <= 64 else value[:61] + "...")
    if isinstance(value, bool | int | float) and abs(value) < 1e30:
        return json.dumps(value)
    return kind_of(value)


def kind_of(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return kinds.get(type(value), "a number")


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Wire):
    """What both routes take. None everywhere means: as if the field were not there."""

    model: str = Field(min_length=1)
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_LEGS)] | None = None
    seed: Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)] | None = None
    stop: Annotated[list[Stop] | None, Field(max_length=MAX_STOPS), BeforeValidator(_stops)] = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED_IDS)] | None = None
    allowed_token_ids: (
        Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Top | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = None
    """The last so many tokens of a prompt; -1: as many as leave room for the answer."""
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Smaller is more urgent."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Cached prefixes are shared only among requests with the same."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None


class CompletionBody(Sampled):
    prompt: Annotated[tuple[str | Ids, ...], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    """0 only with `echo`: the prompt and its logprobs alone are wanted."""
    logprobs: Annotated[Top | None, BeforeValidator(_or_none)] = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_LEGS)] | None = None
    suffix: str | None = None


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    """May be missing beside calls alone."""
    name: str | None = None
    tool_call_id: CallId | None = None
    tool_calls: GivenCalls | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by another name."""
    parsed: Any = None
    """What OpenAI's client for Python read in the content, sent back beside it: passed over."""


class ChatBody(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None
    ) = None


IGNORED = frozenset({"user", "metadata", "store", "service_tier"})

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "length_penalty": (1,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that a route does not have, with the values, besides null, that ask for nothing."""

NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
"""Fields of an answer's message, which clients send back as they got it."""
