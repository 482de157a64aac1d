"""What a model can do with tools, found out once, when its template is loaded.

Templates differ in what they take: whether they tell the model of tools at all, and how they want
a call that is sent back. Reading their source tells little, so they are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from kvrelay.services.router.tools.formats import (
    NO_CALLS,
    CallFormat,
    ReasoningParser,
    ToolParser,
    call_format,
    thinking_of,
)
from kvrelay.services.router.tools.message import Thinking
from kvrelay.shared.errors import RequestError

Render = Callable[[Sequence[Any], Sequence[Any]], str]
"""Messages and tools to a prompt. Raises `RequestError`."""

_USER: Final = {"role": "user", "content": "Hi"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "kvr_tool",
        "description": "kvr",
        "parameters": {"type": "object", "properties": {"kvr_key": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Parsers:
    """What the router's operator says of a model's answers; `auto` goes by its template."""

    tools: ToolParser = "auto"
    reasoning: ReasoningParser = "auto"


AUTO: Final = Parsers()


@dataclass(frozen=True, slots=True)
class ModelTools:
    """Of one model; the default is one that knows nothing of tools or reasoning."""

    format: CallFormat = NO_CALLS
    """`NO_CALLS` if it cannot be told of tools."""
    missing: str = "the model's chat template does not know tools"
    """Why there is no format."""
    takes_calls: bool = False
    """Whether calls and their results can be sent back."""
    arguments_as_objects: bool = True
    empty_content: str | None = ""
    """What stands for the content of a message that has only calls."""
    thinking: Thinking | None = None
    control_ids: Mapping[str, int] = field(default_factory=dict)
    """Of its control tokens, by their text."""

    def tag_ids(self, format: CallFormat, thinking: Thinking | None) -> frozenset[int]:
        """Control tokens that parsers must see as text."""
        tags = format.tags + ((thinking.begin, thinking.end) if thinking else ())
        return frozenset(self.control_ids[tag] for tag in tags if tag in self.control_ids)


NO_TOOLS: Final = ModelTools()


def model_tools(
    source: str, render: Render, control_ids: Mapping[str, int], parsers: Parsers
) -> ModelTools:
    """`source` is that of the template which `render` renders."""
    thinking = thinking_of(source, parsers.reasoning)
    takes_calls, as_objects, empty = _given_calls(render)
    missing = ""
    if parsers.tools == "none":
        missing = "this router was started with --tool-call-parser none"
    elif not _tells_tools(render):
        missing = "the model's chat template does not know tools"
    return ModelTools(
        format=NO_CALLS if missing else call_format(source, parsers.tools),
        missing=missing,
        takes_calls=takes_calls,
        arguments_as_objects=as_objects,
        empty_content=empty,
        thinking=thinking,
        control_ids=control_ids,
    )


def _tells_tools(render: Render) -> bool:
    try:
        return "kvr_tool" in render([_USER], [_TOOL])
    except RequestError:
        return False


def _given_calls(render: Render) -> tuple[bool, bool, str | None]:
    """Whether calls are shown, whether with arguments as objects, and beside which content."""
    arguments = {"kvr_key": "kvr"}
    for (as_objects, given), empty in product(
        ((True, arguments), (False, '{"kvr_key": "kvr"}')), ("", None)
    ):
        function = {"name": "kvr_called", "arguments": given}
        call = {"id": "kvr000001", "type": "function", "function": function}
        messages = [
            _USER,
            {"role": "assistant", "content": empty, "tool_calls": [call]},
            {"role": "tool", "content": "kvr", "tool_call_id": "kvr000001", "name": "kvr_called"},
        ]
        try:
            text = render(messages, [_TOOL])
        except RequestError:
            continue
        if "kvr_called" in text and '"kvr_key"' in text:
            return True, as_objects, empty
    return False, True, ""
