"""Chat templates: the model's own jinja2 source, rendered in a sandbox, as Hugging Face renders it.

A template comes with the model, its input from a client. Neither may reach Python's internals, run
long or produce much: see `kvrelay.services.router.sandbox`, and what it writes is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any, NoReturn, TypedDict

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension

from kvrelay.services.router.sandbox import Allowance, Meter, Sandbox, TakesLong, metered
from kvrelay.shared.errors import ModelError, RequestError

MAX_RENDERED_CHARACTERS = 16 << 20
FULL = Allowance(turns=250_000, seconds=5.0)
BRIEF = Allowance(turns=5_000, seconds=0.02)
"""On the event loop, where nobody else moves meanwhile. Fit for some hundred messages."""

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
"""Names that a request may not give a value of its own: other fields, or the model, do that."""

_END = "\ufdd3"
"""Behind the content that the answer continues; a noncharacter, which stripping does not touch."""


class Message(TypedDict, total=False):
    """What a template sees of one message."""

    role: str
    content: str | None
    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]
    reasoning_content: str


class ChatTemplate:
    """One compiled template. `render` keeps no state and may be called from any thread."""

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises `ModelError` when the source does not compile."""
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: today().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template, line {error.lineno}: {error.message}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._allowed = FULL
        self.knows_developer = "developer" in source
        """Whether it can be given the role `developer`, the newer name for `system`."""

    def brief(self) -> ChatTemplate:
        """The same for the event loop: instead of taking long it raises `TakesLong`."""
        twin = copy(self)
        twin._allowed = BRIEF
        return twin

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text, ending where the assistant's answer begins if that is asked for.

        `variables`: more names for the template; none of its own, see `RESERVED`.
        Raises `TakesLong` when it is `brief`; otherwise `RequestError`, as with the template's own
        complaint or when the text grows too long.
        """
        pieces = []
        characters = 0
        names = {
            **(variables or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            for piece in self._template.generate(metered(names, Meter(self._allowed))):
                pieces.append(piece)
                characters += len(piece)
                if characters > MAX_RENDERED_CHARACTERS:
                    raise _refusal(f"the prompt is over {MAX_RENDERED_CHARACTERS} characters")
        except TakesLong as error:
            if self._allowed is BRIEF:
                raise
            raise _refusal(f"the model's chat template cannot render these: {error}") from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _refusal(f"the model's chat template cannot render these: {error}") from error
        except RecursionError as error:
            raise _refusal("the model's chat template recurses too deep on these") from error
        return "".join(pieces)

    def render_open(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text, ending with the last message's content: the answer goes on with it.

        Raises `RequestError`, also when the template does not show that content.
        """
        *before, last = messages
        marked: Message = {**last, "content": (last["content"] or "") + _END}
        text = self.render(
            [*before, marked], tools=tools, add_generation_prompt=False, variables=variables
        )
        end = text.rfind(_END)
        if end < 0:
            raise _refusal("the model's chat template does not show the last one's content")
        return text[:end]


class Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _refusal(message: str) -> RequestError:
    return RequestError(f"messages: {message}", param="messages", code="invalid_value")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where jinja2's own filter would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
