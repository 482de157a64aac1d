"""From a chat's messages to its prompt text: the model's template, and what a request adds to it.

Text that people typed, in messages or in variables of the template, is guarded: none of it becomes
a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.services.router.openai.schema import ChatBody
from kvrelay.services.router.openai.tool_schema import Tool
from kvrelay.services.router.sampling import refusal
from kvrelay.services.router.template import RESERVED, ChatTemplate, Message
from kvrelay.services.router.tools.history import (
    check_calls,
    guarded,
    worded_calls,
    worded_id,
    worded_tools,
)
from kvrelay.services.router.tools.model import ModelTools
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo

MAX_VALUES = 1024
"""In all variables of the template together: numbers, texts, lists and so on."""
MAX_CHARACTERS = 16 << 10
"""Of the texts in them."""


def conversation(
    body: ChatBody,
    template: ChatTemplate,
    tokenizer: TokenizerInfo,
    model: ModelTools,
    told: Sequence[Tool],
) -> str:
    """For `encode_guarded`. `told`: the tools that the model is told of. Raises `RequestError`."""
    check_calls(body.messages, model)
    messages = _messages(body, template, tokenizer, model)
    tools = worded_tools(told, tokenizer.guard)
    variables = _variables(body.chat_template_kwargs or {}, tokenizer)
    if not body.continue_final_message:
        begins = body.add_generation_prompt is not False
        return template.render(
            messages, tools=tools, add_generation_prompt=begins, variables=variables
        )
    if body.add_generation_prompt:
        raise refusal("continue_final_message", "excludes add_generation_prompt: true")
    return template.render_open(messages, tools=tools, variables=variables)


def _messages(
    body: ChatBody, template: ChatTemplate, tokenizer: TokenizerInfo, model: ModelTools
) -> list[Message]:
    guard = tokenizer.guard
    messages: list[Message] = []
    called: dict[str, str] = {}
    for given in body.messages:
        renamed = given.role == "developer" and not template.knows_developer
        role = "system" if renamed else given.role
        content = model.empty_content if given.content is None else guard(given.content)
        message = Message(role=role, content=content)
        name = given.name
        if given.tool_calls:
            called |= {call.id: call.function.name for call in given.tool_calls}
            message["tool_calls"] = worded_calls(given.tool_calls, model, guard)
        if given.tool_call_id is not None:
            message["tool_call_id"] = worded_id(given.tool_call_id, model, guard)
            name = called.get(given.tool_call_id) if name is None else name
        if name is not None:
            message["name"] = guard(name)
        reasoning = given.reasoning_content or given.reasoning
        if reasoning:
            message["reasoning_content"] = guard(reasoning)
        messages.append(message)
    return messages


def _variables(given: dict[str, Any], tokenizer: TokenizerInfo) -> dict[str, object]:
    for name in given:
        if not name.isidentifier() or len(name) > 64:
            raise refusal("chat_template_kwargs", f"{name[:64]!a} is no name of a variable")
        if name in RESERVED:
            raise refusal("chat_template_kwargs", f"may not set {name!r}")
    values, characters = _extent(given)
    if values > MAX_VALUES or characters > MAX_CHARACTERS:
        raise refusal(
            "chat_template_kwargs",
            f"at most {MAX_VALUES} values and {MAX_CHARACTERS} characters of text (given: "
            f"{values} and {characters})",
        )
    return {name: guarded(value, tokenizer.guard) for name, value in given.items()}


def _extent(value: object) -> tuple[int, int]:
    """How many values it is, and how many characters they have. Its depth is bounded already."""
    if isinstance(value, str):
        return 1, len(value)
    inner = list(value.values()) if isinstance(value, dict) else value
    keys = sum(map(len, value)) if isinstance(value, dict) else 0
    if not isinstance(inner, list):
        return 1, 0
    extents = [_extent(one) for one in inner]
    return 1 + sum(v for v, _ in extents), keys + sum(c for _, c in extents)
