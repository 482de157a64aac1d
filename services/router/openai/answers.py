"""The shape of every answer, for the OpenAPI document and for tests. Nothing is built from these.

What a field means only for some requests is optional here and left out of the others' answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorObject(Shape):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(Shape):
    """Of every status but 2xx, and as the last event but one of a stream that broke off."""

    error: ErrorObject


class CachedTokens(Shape):
    cached_tokens: int


class UsageShape(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class FunctionCall(Shape):
    name: str | None = None
    arguments: str


class ToolCall(Shape):
    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob] | None
    refusal: None


class CompletionLogprobs(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
Finish = Literal["stop", "length", "tool_calls"]


class Delta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Message(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Shape):
    index: int
    logprobs: None
    finish_reason: Finish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None  # type: ignore[assignment]
    finish_reason: Finish


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None  # type: ignore[assignment]


class TextChoice(Choice):
    """`finish_reason` is null in all chunks of a choice but its last."""

    text: str
    logprobs: CompletionLogprobs | None  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


Timing = Annotated[
    dict[str, float], Field(description="Milliseconds by name; with the header X-Kvrelay-Timing: 1")
]


class Answer(Shape):
    id: str
    created: int
    model: str


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageShape
    kvrelay_timing: Timing | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(Answer):
    """One event of a stream. With `usage`, if it was asked for, in the last."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageShape | None = None
    kvrelay_timing: Timing | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageShape
    kvrelay_timing: Timing | None = None


class CompletionChunk(Answer):
    """One event of a stream. With `usage`, if it was asked for, in the last."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageShape | None = None
    kvrelay_timing: Timing | None = None


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


class TokenizerFacts(Shape):
    model: str
    identity: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    add_bos_token: bool
    special_token_ids: list[int]
    chat_template: str | None


class Version(Shape):
    version: str


class Load(Shape):
    server_load: int
    queued: int


class Health(Shape):
    status: Literal["ok"]


class Readiness(Shape):
    status: Literal["ready", "degraded", "not ready"]
    reason: str | None = None
