"""What a request wants of tools, checked against what the model can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.services.router.openai.tool_schema import NamedTool, Tool, ToolChoice
from kvrelay.services.router.structured import check_beside
from kvrelay.services.router.tools.formats import JSON, LLAMA, NO_CALLS, begins_thinking
from kvrelay.services.router.tools.grammar import Function, Wanted, call_grammar
from kvrelay.services.router.tools.model import ModelTools
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import Constraint, GrammarKind, MessageForm, ValidRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """Tools that the model is told of, and how it may call them."""

    tools: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    """Those that may be called: all, or the one that was named."""
    must_call: bool = False
    many: bool = True

    @property
    def enforced(self) -> bool:
        """Whether sampling must be kept to what was asked."""
        strict = any(tool.function.strict for tool in self.callable)
        return self.must_call or (bool(self.callable) and (strict or not self.many))


def asked_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    model: ModelTools,
) -> Asked:
    """Raises `RequestError`. With the choice `none` the model is not told of any."""
    tools = tools or ()
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _refusal("tool_choice", "there are no tools to choose from")
        return Asked()
    names = [tool.function.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise _refusal(f"tools[{at}].function.name", f"two tools have the name {name!a}")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        shown = choice.function.name
        raise _refusal("tool_choice.function.name", f"there is no tool of the name {shown!a}")
    if choice == "none":
        return Asked()
    if model.format is NO_CALLS:
        raise RequestError(f"tools: {model.missing}", param="tools", code="unsupported_parameter")
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        return Asked(tools, named, must_call=True, many=False)
    return Asked(tools, tools, must_call=choice == "required", many=parallel is not False)


def with_tools(request: ValidRequest, asked: Asked, model: ModelTools, prompt: str) -> ValidRequest:
    """The request with how the answer to this prompt is read, and what it must be.

    Raises `RequestError`.
    """
    message = message_form(asked, model, prompt)
    form = replace(request.form, message=message)
    constraint = _constraint(request.constraint, asked, model, message)
    if constraint is not None and constraint.kind is GrammarKind.CALLS:
        for leg in request.legs:
            check_beside(constraint, leg.sampling)
    return replace(request, form=form, constraint=constraint)


def _constraint(
    given: Constraint | None, asked: Asked, model: ModelTools, message: MessageForm
) -> Constraint | None:
    """What else was asked of the answer is asked of its content: there is none beside calls that
    must be made, and before it there may be reasoning."""
    if given is None or asked.must_call:
        if not asked.enforced:
            return None
        wanted = _wanted(asked, model, message)
        text = call_grammar(wanted, model.format, model.control_ids.get)
        return Constraint(GrammarKind.CALLS, text, "tools")
    if not asked.callable and model.thinking is None:
        return given
    if asked.callable and model.format in (JSON, LLAMA):
        raise _refusal(
            given.param,
            "cannot stand beside tools here, as calls of this model are JSON without a mark, too: "
            "set tool_choice to 'none' or 'required'",
        )
    wanted = replace(_wanted(asked, model, message), content=True)
    around = call_grammar(wanted, model.format, model.control_ids.get)
    return replace(given, around=around)


def _wanted(asked: Asked, model: ModelTools, message: MessageForm) -> Wanted:
    functions = [
        Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in asked.callable
    ]
    begun = message.thinking_begun
    return Wanted(functions, asked.must_call, asked.many, model.thinking, thinking_begun=begun)


def message_form(asked: Asked, model: ModelTools, prompt: str) -> MessageForm:
    format = model.format if asked.callable else NO_CALLS
    thinking = model.thinking
    return MessageForm(
        calls=format.name,
        names=tuple(tool.function.name for tool in asked.callable),
        one_call=not asked.many,
        short_ids=format.short_ids,
        thinking=None if thinking is None else (thinking.begin, thinking.end),
        thinking_begun=thinking is not None and begins_thinking(prompt, thinking),
        text_ids=model.tag_ids(format, thinking),
    )


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")
