"""The OpenAPI document: what the routes take and give, from the models that check it.

A body's schema says what one field alone may be. What fields say together (`stream_options` without
`stream`, ids beyond the vocabulary, a prompt longer than the context) is a 400 as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvrelay import __version__
from kvrelay.services.router.openai import answers
from kvrelay.services.router.openai.generate import CHAT, COMPLETIONS
from kvrelay.services.router.openai.schema import (
    IGNORED,
    MAX_LEGS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    ChatBody,
    ChatMessage,
    CompletionBody,
)
from kvrelay.services.router.openai.tokens import MAX_CHARACTERS, DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: Final = {"type": "string", "minLength": 1}
_STOP: Final = {**_TEXT, "maxLength": MAX_STOP_CHARACTERS}
_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_STOPS: Final = {
    "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]
}

FORMS: Final[Mapping[tuple[type[BaseModel], str], Schema]] = {
    (CompletionBody, "prompt"): {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_LEGS},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_LEGS},
        ]
    },
    (CompletionBody, "stop"): _STOPS,
    (CompletionBody, "logprobs"): {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
            {"enum": [False, None]},
        ]
    },
    (ChatBody, "stop"): _STOPS,
    (ChatMessage, "content"): {
        "anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]
    },
}
"""Fields that come in several forms, of which the models keep one."""

_BODIES: Final = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_ANSWERS: Final = (
    *(answers.Error, answers.ChatCompletion, answers.ChatCompletionChunk, answers.Completion),
    *(answers.CompletionChunk, answers.Models, answers.Model, answers.Tokens, answers.Text),
    *(answers.TokenizerFacts, answers.Version, answers.Load, answers.Health, answers.Readiness),
)

_WHY: Final = {
    400: "The request is wrong; `param` names the field",
    401: "No API key, or not one of this server's",
    404: "No such model",
    408: "The body took too long",
    413: "The body is too large",
    429: "No room now; `Retry-After` says when to come again",
    431: "The request's head is too large",
    500: "The server failed",
    503: "Nobody can serve this now",
    504: "It took longer than this server lets it",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as the document tells it."""

    name: str
    says: str
    gives: type[BaseModel] | str
    """A model, or a content type of plain text."""
    fails: tuple[int, ...] = ()
    """Statuses of its own, with `Error`; those that every route has come on top."""
    takes: str = ""
    events: type[BaseModel] | None = None
    """Of its stream."""
    probe: bool = False


_GENERATING: Final = (400, 404, 408, 413, 429, 503, 504)
_READING: Final = (400, 404, 408, 413, 429, 503)
ROUTES: Final[Mapping[tuple[str, str], Operation]] = {
    (COMPLETIONS.path, "post"): Operation(
        *("create_completion", "Continue prompts", answers.Completion, _GENERATING),
        *("CompletionBody", answers.CompletionChunk),
    ),
    (CHAT.path, "post"): Operation(
        *("create_chat_completion", "Answer a conversation", answers.ChatCompletion, _GENERATING),
        *("ChatBody", answers.ChatCompletionChunk),
    ),
    ("/v1/models", "get"): Operation("list_models", "The names being served", answers.Models),
    ("/v1/models/{name}", "get"): Operation("get_model", "One of them", answers.Model, (404,)),
    ("/tokenize", "post"): Operation(
        "tokenize", "A text or a conversation as token ids", answers.Tokens, _READING, "Tokenize"
    ),
    ("/detokenize", "post"): Operation(
        "detokenize", "The text of token ids", answers.Text, _READING, "DetokenizeBody"
    ),
    ("/tokenizer_info", "get"): Operation(
        "get_tokenizer_info", "The tokenizer and its template", answers.TokenizerFacts, (503,)
    ),
    ("/version", "get"): Operation("get_version", "What this server is", answers.Version),
    ("/load", "get"): Operation("get_load", "Requests under way here", answers.Load),
    ("/openapi.json", "get"): Operation("get_document", "This document", "application/json"),
    ("/metrics", "get"): Operation("get_metrics", "For Prometheus", "text/plain"),
    ("/health", "get"): Operation("get_health", "It is alive", answers.Health, probe=True),
    ("/ready", "get"): Operation("get_readiness", "It can serve", answers.Readiness, probe=True),
}


def openapi_document(*, with_metrics: bool, with_keys: bool) -> Schema:
    """Of a server that has /metrics on this port, or not, and asks for API keys, or not."""
    paths: dict[str, Schema] = {}
    for (path, method), operation in ROUTES.items():
        if path != "/metrics" or with_metrics:
            paths.setdefault(path, {})[method] = _operation(path, operation, with_keys)
    components: Schema = {"schemas": _schemas()}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(path: str, operation: Operation, with_keys: bool) -> Schema:
    guarded = with_keys and not operation.probe
    fails = {*operation.fails, 431, 500} | ({429} if not operation.probe else set())
    responses = {str(status): _failure(status) for status in {*fails, *((401,) if guarded else ())}}
    responses["200"] = {"description": "Done", "content": _content(operation)}
    if operation.gives is answers.Readiness:
        responses["503"] = {"description": "Not now", "content": _content(operation)}
    told: Schema = {
        "operationId": operation.name,
        "summary": operation.says,
        "responses": dict(sorted(responses.items())),
    }
    if operation.takes:
        told["requestBody"] = {"required": True, "content": _json(_ref(operation.takes))}
    if "{name}" in path:
        told["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.events is not None:
        told["parameters"] = [
            {
                "name": "X-Kvrelay-Timing",
                "in": "header",
                "description": "1: the answer tells where its time went",
                "schema": {"type": "string"},
            }
        ]
    if guarded:
        told["security"] = [{"key": []}]
    return told


def _content(operation: Operation) -> Schema:
    if isinstance(operation.gives, str):
        kind = {"type": "object" if operation.gives == "application/json" else "string"}
        return {operation.gives: {"schema": kind}}
    content = _json(_ref(operation.gives.__name__))
    if operation.events is not None:
        content["text/event-stream"] = {
            "schema": _event(operation.events.__name__),
            "x-event": _ref(operation.events.__name__),
        }
    return content


def _event(name: str) -> Schema:
    """Of each event of a stream: JSON in `data`, and at the end a word."""
    told = {"anyOf": [_ref(name), _ref("Error")]}
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    data = {"anyOf": [{"const": "[DONE]"}, text]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _failure(status: int) -> Schema:
    return {"description": _WHY[status], "content": _json(_ref("Error"))}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> dict[str, Schema]:
    wanted = [(model, "validation") for model in (*_BODIES, *_ANSWERS)]
    template = "#/components/schemas/{model}"
    _, made = models_json_schema(wanted, ref_template=template)  # type: ignore[arg-type]
    schemas: dict[str, Schema] = made["$defs"]
    for (model, name), form in FORMS.items():
        schemas[model.__name__]["properties"][name] = form
    for body in (CompletionBody, ChatBody):
        _add(schemas[body.__name__], {**dict.fromkeys(IGNORED, ()), **NEUTRAL}, IGNORED)
    _add(schemas["ChatMessage"], NEUTRAL_IN_MESSAGE)
    schemas["Tokenize"] = _tokenize(schemas)
    return schemas


def _add(
    schema: Schema, neutral: Mapping[str, Sequence[object]], any_value: frozenset[str] = frozenset()
) -> None:
    """Fields that are no part of the model and yet accepted, with any value or with these."""
    for name in sorted(neutral.keys() - schema["properties"].keys()):
        only = {"enum": [None, *neutral[name]]}
        schema["properties"][name] = {} if name in any_value else only


def _tokenize(schemas: dict[str, Schema]) -> Schema:
    """A text, or what the chat route takes with two fields more."""
    chat = schemas["ChatBody"]
    flag = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
    off = {"enum": [None, False]}
    own = {"return_token_strs": flag, "add_special_tokens": off}
    conversation = {
        **chat,
        "title": "TokenizeChatBody",
        "properties": {**chat["properties"], **own},
        "required": ["messages"],
    }
    text = schemas["TokenizeBody"]
    text["properties"]["prompt"]["maxLength"] = MAX_CHARACTERS
    return {"anyOf": [_ref("TokenizeBody"), conversation]}
