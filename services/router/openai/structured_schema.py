"""The fields that say what an answer must be, as pydantic models.

Their texts go unread from here to where grammars are checked, which bounds what they may ask for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_CHOICES = 4096
MAX_REGEX_CHARACTERS = 1 << 15
MAX_GRAMMAR_CHARACTERS = 1 << 17


def _schema(value: object) -> object:
    if value is None or isinstance(value, dict | str):
        return value
    raise PydanticCustomError("schema_type", "must be a JSON schema: an object, or its text")


Schema = Annotated[Any, BeforeValidator(_schema)]
Regex = Annotated[str, Field(max_length=MAX_REGEX_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchemaFormat(_Wire):
    """Enforced whether or not it is `strict`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Wire):
    """Exactly one of them."""

    content: Annotated[Schema, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
