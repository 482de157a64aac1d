"""Which fields say what an answer must be, and what they say.

At most one may. What stands beside it must not contradict it: a token that one field wants and the
other forbids would leave nothing to draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvrelay.services.router.openai.schema import Sampled
from kvrelay.services.router.openai.structured_schema import ResponseFormat, StructuredOutputs
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import Constraint, GrammarKind, SamplingParams

MAX_TEXT_BYTES = 1 << 18
"""Of a schema, and of all choices together."""
_ANY_OBJECT = '{"type":"object"}'


def constraint_of(body: Sampled) -> Constraint | None:
    """None where the answer may be anything. Raises `RequestError`."""
    found = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs)]
    found += _of_guided(body)
    if not found:
        return None
    asked = found[0]
    if len(found) > 1:
        other = found[1].param
        raise _refusal(other, f"cannot stand beside {asked.param}: an answer has one form")
    size = len(asked.text.encode())
    if size > MAX_TEXT_BYTES:
        raise _refusal(asked.param, f"at most {MAX_TEXT_BYTES} bytes are taken (given: {size})")
    return asked


def check_beside(asked: Constraint, sampling: SamplingParams) -> None:
    """Raises `RequestError` for what cannot be kept together with a grammar."""
    beside = {
        "min_tokens": sampling.min_tokens > 0,
        "ignore_eos": sampling.ignore_eos,
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
    }
    for name, given in beside.items():
        if given:
            raise _refusal(name, f"cannot be kept together with {asked.param}")


def _of_format(given: ResponseFormat | None) -> Iterator[Constraint]:
    if given is None:
        return
    kind, schema = given.type, given.json_schema
    if kind == "json_schema":
        if schema is None:
            raise RequestError(
                "response_format.json_schema: this field is required when type is json_schema",
                param="response_format.json_schema",
                code="missing_required_parameter",
            )
        yield _schema(schema.content, "response_format.json_schema.schema")
    elif schema is not None:
        complaint = f"is only allowed when type is json_schema, not {kind}"
        raise _refusal("response_format.json_schema", complaint)
    elif kind == "json_object":
        yield Constraint(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, "response_format")


def _of_outputs(given: StructuredOutputs | None) -> Iterator[Constraint]:
    if given is None:
        return
    where = "structured_outputs"
    found = [
        *_of_texts(where + ".", given.content, given.regex, given.choice, given.grammar),
    ]
    if given.json_object:
        found.append(Constraint(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, f"{where}.json_object"))
    if len(found) != 1:
        names = "json, regex, choice, grammar and json_object"
        raise _refusal(where, f"exactly one of {names} must be given, not {len(found)}")
    yield found[0]


def _of_guided(body: Sampled) -> Iterator[Constraint]:
    """The same by older names."""
    return _of_texts(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _of_texts(
    where: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    if schema is not None:
        yield _schema(schema, where + "json")
    if regex is not None:
        yield Constraint(GrammarKind.REGEX, regex, where + "regex")
    if choice is not None:
        text = json.dumps(choice, ensure_ascii=False)
        yield Constraint(GrammarKind.CHOICE, text, where + "choice")
    if grammar is not None:
        yield Constraint(GrammarKind.GRAMMAR, grammar, where + "grammar")


def _schema(schema: dict[str, Any] | str, param: str) -> Constraint:
    if not isinstance(schema, str):
        schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return Constraint(GrammarKind.JSON_SCHEMA, schema, param)


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")
