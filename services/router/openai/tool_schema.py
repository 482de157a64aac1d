"""The parts of chat bodies that are about tools, as pydantic models."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_DESCRIPTION_CHARACTERS = 1 << 16
MAX_CALLS = 128
"""Of one message."""

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        complaint = "must be a JSON schema whose type is 'object'"
        raise PydanticCustomError("schema", "{complaint}", {"complaint": complaint})
    characters = len(json.dumps(value))
    if characters > MAX_SCHEMA_CHARACTERS:
        complaint = f"at most {MAX_SCHEMA_CHARACTERS} characters of JSON, not {characters}"
        raise PydanticCustomError("schema", "{complaint}", {"complaint": complaint})
    return value


class ToolWire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class FunctionDefinition(ToolWire):
    name: Name
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None
    """A JSON schema; without one the function takes nothing."""
    strict: bool | None = None
    """Arguments follow the schema exactly, also where the model chooses to call."""


class Tool(ToolWire):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ToolWire):
    name: Name


class NamedTool(ToolWire):
    type: Literal["function"]
    function: FunctionName


def _kind_of_choice(value: object) -> str:
    return "one tool" if isinstance(value, dict | NamedTool) else "a mode"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")]
    | Annotated[NamedTool, Tag("one tool")],
    Discriminator(_kind_of_choice),
]
"""The tags have blanks, by which an error's path leaves them out."""


class CalledFunction(ToolWire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    """JSON, as the model wrote it."""
    parsed_arguments: Any = None
    """What OpenAI's client for Python read in the arguments: passed over."""


class GivenCall(ToolWire):
    """A call of an earlier answer, sent back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Left over from a stream; means nothing here."""


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
GivenCalls: TypeAlias = Annotated[list[GivenCall], Field(max_length=MAX_CALLS)]
