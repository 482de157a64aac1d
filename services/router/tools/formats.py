"""Which form a model writes its calls and its reasoning in, told from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvrelay.services.router.tools.message import Thinking

ToolParser: TypeAlias = Literal["auto", "none", "hermes", "llama", "mistral", "json"]
ReasoningParser: TypeAlias = Literal["auto", "none", "think", "mistral"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written."""

    name: str
    """By which its parser is found."""
    tags: tuple[str, ...] = ()
    """Where they are control tokens of the model, they are text to the parser all the same."""
    arguments_key: str = "arguments"
    short_ids: bool = False
    """Templates of these models take call ids of nine letters and digits alone."""
    named: bool = False
    """The name stands before the arguments, not with them in one object."""


NO_CALLS = CallFormat("none")
HERMES = CallFormat("hermes", ("<tool_call>", "</tool_call>"))
LLAMA = CallFormat("llama", ("<|python_tag|>",), arguments_key="parameters")
JSON = CallFormat("json")
_MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL = CallFormat("mistral", _MISTRAL_TAGS, short_ids=True)
MISTRAL_NAMED = CallFormat("mistral", _MISTRAL_TAGS, short_ids=True, named=True)

THINKING: Mapping[str, Thinking] = {
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
}

_OTHER_CALLS = ("<function=", "<arg_key>")
"""Behind the tag of HERMES these stand for calls that are no JSON."""


def call_format(template: str, choice: ToolParser = "auto") -> CallFormat:
    """JSON is what is left: a template that writes calls in none of the known tags."""
    if choice == "none":
        return NO_CALLS
    if choice == "mistral" or (choice == "auto" and "[TOOL_CALLS]" in template):
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if choice == "auto" and not any(other in template for other in _OTHER_CALLS):
        choice = "hermes" if "<tool_call>" in template else "auto"
    if choice == "auto" and ("<|python_tag|>" in template or "ipython" in template):
        choice = "llama"
    return {"hermes": HERMES, "llama": LLAMA}.get(choice, JSON)


def thinking_of(template: str, choice: ReasoningParser = "auto") -> Thinking | None:
    """A template that has the closing tag takes reasoning out of earlier answers, or opens one."""
    if choice != "auto":
        return THINKING.get(choice)
    return next((tags for tags in THINKING.values() if tags.end in template), None)


def begins_thinking(prompt: str, tags: Thinking) -> bool:
    """Whether the prompt ends within reasoning, so that the answer begins there."""
    return prompt.rstrip().endswith(tags.begin)
