"""Earlier calls, their results, and tools as chat templates take them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvrelay.services.router.openai.tool_schema import GivenCall, Tool
from kvrelay.services.router.tools.grammar import NO_PARAMETERS
from kvrelay.services.router.tools.model import ModelTools
from kvrelay.shared.errors import RequestError

Guard = Callable[[str], str]
"""Keeps what people wrote from being control tokens."""

SHORT_ID_CHARACTERS = 9
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class Given(Protocol):
    """What this needs of a chat message."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str | None: ...
    @property
    def tool_call_id(self) -> str | None: ...
    @property
    def model_fields_set(self) -> set[str]: ...
    @property
    def tool_calls(self) -> list[GivenCall] | None: ...


def call_id(request_id: str, leg: int, index: int, *, short: bool) -> str:
    """Of a call in an answer: the same whether it is streamed or not."""
    digest = hashlib.blake2s(f"{request_id}/{leg}/{index}".encode()).hexdigest()
    return digest[:SHORT_ID_CHARACTERS] if short else f"call_{digest[:24]}"


def check_calls(messages: Sequence[Given], model: ModelTools) -> None:
    """Calls stand in assistants' messages, and right behind each its results do.

    Raises `RequestError`.
    """
    unanswered: dict[str, str] = {}
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if message.role == "tool":
            _check_result(message, where, unanswered)
        else:
            _check_answered(unanswered)
            if message.tool_calls:
                unanswered = _check_given(message.role, message.tool_calls, where, model)
        if message.content is None and not message.tool_calls:
            raise _no_content(message, f"{where}.content")
    _check_answered(unanswered)


def _check_result(message: Given, where: str, unanswered: dict[str, str]) -> None:
    param = f"{where}.tool_call_id"
    if message.tool_calls:
        raise _wrong(f"{where}.tool_calls", "only a message of the assistant has them")
    if message.tool_call_id is None:
        raise _missing(param, "a message with role 'tool' needs it")
    if unanswered.pop(message.tool_call_id, None) is None:
        raise _wrong(
            param,
            "a message with role 'tool' must answer one of the tool_calls right before it (given: "
            f"{message.tool_call_id[:64]!a})",
        )


def _no_content(message: Given, param: str) -> RequestError:
    if "content" not in message.model_fields_set:
        return _missing(param, "this field is required")
    complaint = "must be a string or a list of text parts (given: null)"
    return RequestError(f"{param}: {complaint}", param=param, code="invalid_type")


def _check_answered(unanswered: dict[str, str]) -> None:
    for id, where in unanswered.items():
        raise _wrong(
            where,
            "messages with role 'tool' must follow that answer each of them; there is none for "
            f"{id[:64]!a}",
        )


def _check_given(
    role: str, calls: Sequence[GivenCall], where: str, model: ModelTools
) -> dict[str, str]:
    """The ids, each with the field it is to be blamed on."""
    param = f"{where}.tool_calls"
    if role != "assistant":
        raise _wrong(param, "only a message of the assistant has them")
    if not model.takes_calls:
        raise RequestError(
            f"{param}: the model's chat template does not know them",
            param=param,
            code="unsupported_parameter",
        )
    ids: dict[str, str] = {}
    for at, call in enumerate(calls):
        if call.id in ids:
            raise _wrong(f"{param}[{at}].id", f"two calls have this id (given: {call.id[:64]!a})")
        ids[call.id] = param
    return ids


def worded_calls(
    calls: Sequence[GivenCall], model: ModelTools, guard: Guard
) -> list[dict[str, Any]]:
    worded = []
    for call in calls:
        arguments: object = call.function.arguments
        if model.arguments_as_objects:
            arguments = _object(call.function.arguments)
        function = {"name": guard(call.function.name), "arguments": guarded(arguments, guard)}
        worded.append(
            {"id": worded_id(call.id, model, guard), "type": "function", "function": function}
        )
    return worded


def worded_id(id: str, model: ModelTools, guard: Guard) -> str:
    """Calls that another server answered may have ids that this model's template does not take."""
    if model.format.short_ids and not _SHORT_ID.fullmatch(id):
        return hashlib.blake2s(id.encode()).hexdigest()[:SHORT_ID_CHARACTERS]
    return guard(id)


def worded_tools(tools: Sequence[Tool], guard: Guard) -> list[dict[str, Any]]:
    """In the order of fields that models were trained on; `strict` is for the server."""
    worded = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        parameters = tool.function.parameters
        function["parameters"] = NO_PARAMETERS if parameters is None else parameters
        worded.append({"type": "function", "function": guarded(function, guard)})
    return worded


def guarded(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): guarded(one, guard) for key, one in value.items()}
    if isinstance(value, list):
        return [guarded(one, guard) for one in value]
    return value


def _object(arguments: str) -> object:
    """The text itself if it is no object: models write such, and agents send it back."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _wrong(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _missing(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="missing_required_parameter")
