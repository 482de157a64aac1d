"""200 JSON schemas in the manner of JSON Schema's own test suite, and larger ones made of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

Schema = dict[str, Any]

_STRINGS: tuple[Schema, ...] = (
    {"type": "string"},
    {"type": "string", "maxLength": 4},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 9, "pattern": "^[a-f0-9]+$"},
    {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
    {"type": "string", "pattern": "^(foo|bar|[ÄÖÜ]{2,3})+$", "maxLength": 12},
    {"type": "string", "pattern": "b.d", "maxLength": 8},
    {"type": "string", "pattern": "^[^\\x00-\\x7F]{1,3}$"},
    {"type": "string", "pattern": "^\\w+ \\w+$", "maxLength": 10},
    {"type": "string", "pattern": "^\\S+\\t?$", "maxLength": 6},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email", "maxLength": 30},
    {"type": "string", "format": "duration"},
)
_NUMBERS: tuple[Schema, ...] = (
    {"type": "integer"},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "integer", "minimum": 1234567, "maximum": 7654321},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100},
)
_VALUES: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"const": "été ☃ 𝄞"},
    {"const": {"a": [1, None, {"b": '"\\/\n'}]}},
    {"const": []},
    {"enum": ["red", "green", None, 42, True, ["x"]]},
    {"enum": ["日本", "日本語", "日", "🧑‍🚀"]},
    {"type": "string", "enum": ["a\tb", "\u2028", '"', "\\", ""]},
    {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 3, "maximum": 9},
)
_ARRAYS: tuple[Schema, ...] = (
    {"type": "array", "maxItems": 3, "items": {"type": "integer", "maximum": 9, "minimum": 0}},
    {"type": "array", "minItems": 2, "maxItems": 4, "items": {"enum": ["a", "b"]}},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"const": "r"},
        "minItems": 3,
        "maxItems": 4,
    },
    {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "null"}},
    },
    {"type": "array", "maxItems": 0},
    {"type": "array", "uniqueItems": False, "items": {"const": 1}, "maxItems": 3},
)
_OBJECTS: tuple[Schema, ...] = (
    {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"naïve key ☕": {"const": 1}, 'quo"te\\': {"const": 2}, "": {"const": 3}},
        "required": ["naïve key ☕", 'quo"te\\', ""],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "null"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"type": "object", "required": ["z", "y"], "additionalProperties": {"const": "v"}},
    {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"enum": ["p", "q"]},
        "maxProperties": 3,
    },
    {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": True},
)
_TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 99},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_WHOLE: tuple[Schema, ...] = (
    _TREE,
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    {"definitions": {"s": {"type": "string", "maxLength": 2}}, "$ref": "#/definitions/s"},
    {"$defs": {"a~/b%": {"const": "odd"}}, "$ref": "#/$defs/a~0~1b%25"},
    {"$defs": {"n": {"$anchor": "here", "type": "null"}}, "$ref": "#here"},
    {"$id": "http://example.com/root", "$defs": {"i": {"const": 7}}, "$ref": "#/$defs/i"},
    {
        "$defs": {
            "even": {"anyOf": [{"const": 0}, {"$ref": "#/$defs/odd"}]},
            "odd": {"type": "array", "prefixItems": [{"$ref": "#/$defs/even"}], "items": False},
        },
        "$ref": "#/$defs/even",
    },
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 6}, {"const": "five"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}, {"type": "null"}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: {"type": type}},
                "required": ["kind", kind],
                "additionalProperties": False,
            }
            for kind, type in (("flag", "boolean"), ("nothing", "null"))
        ]
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 6}]},
    {
        "allOf": [
            {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "type": "object",
        "maxProperties": 2,
    },
    {
        "title": "notes and defaults ask for nothing",
        "description": "d",
        "default": 3,
        "examples": [4],
        "$comment": "c",
        "deprecated": False,
        "type": "integer",
        "minimum": 1,
        "maximum": 4,
    },
    {"type": "object"},
    {},
)
_PARTS = (*_STRINGS, *_NUMBERS, *_VALUES, *_ARRAYS, *_OBJECTS)


def schemas(count: int = 200) -> list[Schema]:
    """The same ones each time, no two equal."""
    found: dict[str, Schema] = {}
    rng = random.Random("schemas")
    for schema in chain(_PARTS, _WHOLE, _made(rng)):
        found.setdefault(json.dumps(schema), schema)
        if len(found) == count:
            return [*found.values()]
    raise AssertionError("never")


def _made(rng: random.Random) -> Iterator[Schema]:
    while True:
        yield _compound(rng, 2)


def _compound(rng: random.Random, depth: int) -> Schema:
    if depth == 0:
        return rng.choice(_PARTS)
    form = rng.randrange(5 if depth == 2 else 4)
    if form == 0:
        least = rng.randint(0, 2)
        items = _compound(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
    if form == 4:  # at the root, to which they refer
        name = rng.choice(("part", "größe", "名"))
        inner = {"$defs": {name: _compound(rng, depth - 1)}}
        twice = [{"$ref": f"#/$defs/{name}"}] * 2
        return inner | {"type": "array", "prefixItems": twice, "minItems": 2, "items": False}
    if form == 1:
        return {"anyOf": [_compound(rng, depth - 1), rng.choice(_VALUES)]}
    names = rng.sample(("id", "naïve", "🗝", "a b", "tags", "x"), rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _compound(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
