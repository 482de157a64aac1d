"""What an answer must be, at the HTTP edge: accepted with a grammar, or refused with the reason."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.unit.edge.conftest import ScriptedCluster

from kvrelay.services.router.structured_child import COMPUTE_S
from kvrelay.services.router.structured_pool import Grammars, PoolLimits
from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.errors import Overloaded, Unavailable
from kvrelay.shared.types import Constraint, GrammarKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "é"}}}
ENDLESS = "start: /a/ start"
WIDE = "start: " + " | ".join(f'"c{number}"' for number in range(4096))
EXPLODES = {"patternProperties": {f"^{i // 26}{chr(97 + i % 26)}.*": {} for i in range(300)}}


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars()
    yield made
    made.close()


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields})


def json_schema(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


ACCEPTED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '"json_schema":{"type":"object"'),
    ({"response_format": json_schema(SCHEMA)}, '"properties":{"b":{"type":"null"},"a"'),
    ({"response_format": json_schema(SCHEMA, strict=True, description="d")}, '"const":"é"'),
    ({"structured_outputs": {"json": SCHEMA}}, '"const":"é"'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"const":"é"'),
    ({"structured_outputs": {"regex": "a/b+"}}, "start: /a"),
    ({"structured_outputs": {"choice": ["yes", "n\no"]}}, "start: "),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "lark_grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "lark_grammar"),
    ({"structured_outputs": {"json_object": True}}, '{"type":"object"'),
    ({"guided_json": SCHEMA}, '"const":"é"'),
    ({"guided_regex": "[ab]"}, "start: /[ab]/"),
    ({"guided_choice": ["a"]}, "start: "),
    ({"guided_grammar": 'start: "a"'}, "lark_grammar"),
]


async def test_each_form_reaches_every_leg(
    client: httpx.AsyncClient, cluster: ScriptedCluster
) -> None:
    for fields, expected in ACCEPTED:
        response = await post(client, n=2, **fields)
        assert response.status_code == 200, (fields, response.text)
        seen = {leg.sampling.grammar for leg in cluster.requests[-1].legs}
        assert len(seen) == 1 and expected in seen.pop(), fields


async def test_text_is_no_constraint(client: httpx.AsyncClient, cluster: ScriptedCluster) -> None:
    response = await post(client, response_format={"type": "text"})
    assert response.status_code == 200
    assert cluster.requests[0].legs[0].sampling.grammar == ""


FORMAT = "response_format"
IN_SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({FORMAT: {"type": "xml"}}, "response_format.type", "json_schema"),
    ({FORMAT: {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({FORMAT: json_schema(SCHEMA) | {"type": "text"}}, "response_format.json_schema", "text"),
    ({FORMAT: json_schema(3)}, IN_SCHEMA, "dictionary"),
    ({FORMAT: json_schema({"type": "notatype"})}, IN_SCHEMA, "notatype"),
    ({FORMAT: json_schema({"$ref": "#"})}, IN_SCHEMA, "nothing satisfies it"),
    ({FORMAT: json_schema({"$ref": "#/$defs/x"})}, IN_SCHEMA, "/$defs/x"),
    ({FORMAT: json_schema({"type": "string", "format": "nope"})}, IN_SCHEMA, "nope"),
    ({FORMAT: json_schema({"not": {}}, strict=False)}, IN_SCHEMA, "not"),
    ({FORMAT: json_schema({"if": {}, "then": {}})}, IN_SCHEMA, "if"),
    ({FORMAT: json_schema({"type": "array", "uniqueItems": True})}, IN_SCHEMA, "uniqueItems"),
    ({FORMAT: json_schema({"divisibleBy": 2})}, IN_SCHEMA, "divisibleBy"),
    ({FORMAT: json_schema({"properties": {"a": {"extends": {}}}})}, IN_SCHEMA, "extends"),
    ({FORMAT: json_schema({"items": [{}]})}, IN_SCHEMA, "prefixItems"),
    ({FORMAT: json_schema({"minProperties": 2})}, IN_SCHEMA, "minProperties"),
    ({FORMAT: json_schema({"minimum": 1, "exclusiveMinimum": True})}, IN_SCHEMA, "exclusive"),
    ({FORMAT: json_schema({"x-guidance": {"lenient": True}})}, IN_SCHEMA, "x-guidance"),
    ({FORMAT: json_schema({"pattern": "(?=a)b"})}, IN_SCHEMA, "look-around"),
    ({FORMAT: json_schema({"enum": []})}, IN_SCHEMA, "empty"),
    ({FORMAT: json_schema({"multipleOf": 999999937, "type": "integer"})}, IN_SCHEMA, "fuel"),
    ({FORMAT: json_schema({}) | {"extra": 1}}, "response_format.extra", "Unknown"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Unkno"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "Expecting"),
    ({"structured_outputs": {"json": '{"const": "\\ud83d"}'}}, "structured_outputs.json", "half"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "(?P<"}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": "(a|" * 9000}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"grammar": '{"grammars":[]}'}}, "structured_outputs.grammar", "1(1)"),
    ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar", "Expected"),
    ({"structured_outputs": {"grammar": "start: <|nope|>"}}, "structured_outputs.grammar", "nope"),
    ({"structured_outputs": {"grammar": ENDLESS}}, "structured_outputs.grammar", "not go on"),
    ({"structured_outputs": {"grammar": WIDE}}, "structured_outputs.grammar", "not go on"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"guided_json": "3"}, "guided_json", "object"),
    ({"guided_regex": "a", FORMAT: {"type": "json_object"}}, "guided_regex", "response_format"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "guided_regex"),
    ({"guided_regex": "a", "bad_words": ["he"]}, "bad_words", "guided_regex"),
]


async def test_what_cannot_be_enforced_is_refused_by_name(
    client: httpx.AsyncClient, cluster: ScriptedCluster
) -> None:
    for fields, param, part in REFUSED:
        response = await post(client, **fields)
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), fields
        assert part in error["message"] and len(error["message"]) < 500, error
    assert not cluster.requests


async def test_one_that_explodes_is_refused_in_time_and_nobody_notices(
    client: httpx.AsyncClient,
) -> None:
    await post(client, response_format=json_schema(SCHEMA))
    begun_s = time.monotonic()
    exploding = asyncio.create_task(post(client, response_format=json_schema(EXPLODES)))
    longest_s, served = 0.0, 0
    while not exploding.done():
        one_s = time.monotonic()
        assert (await post(client)).status_code == 200
        assert (await post(client, response_format=json_schema(SCHEMA))).status_code == 200
        longest_s = max(longest_s, time.monotonic() - one_s)
        served += 1
        await asyncio.sleep(0.01)
    response = exploding.result()
    assert response.status_code == 400 and "too complex" in response.text
    assert time.monotonic() - begun_s < 20 * COMPUTE_S and served > 10 and longest_s < 0.5
    begun_s = time.monotonic()
    assert (await post(client, response_format=json_schema(EXPLODES))).status_code == 400
    assert time.monotonic() - begun_s < 0.5, "it is not tried again"
    assert (await post(client, guided_regex="new")).status_code == 200


def regex(text: str) -> Constraint:
    return Constraint(GrammarKind.REGEX, text, "guided_regex")


async def test_asked_at_once_it_is_checked_once(grammars: Grammars, card: ModelCard) -> None:
    waiting = [asyncio.create_task(grammars.grammar(regex("a+"), card)) for _ in range(50)]
    await asyncio.sleep(0)
    assert len(grammars._asked) == 1
    waiting[0].cancel()  # a client that leaves takes it from nobody
    found = await asyncio.gather(*waiting[1:])
    assert set(found) == {found[0]} and "a+" in found[0]


async def test_a_process_that_died_while_it_waited_is_replaced(
    grammars: Grammars, card: ModelCard
) -> None:
    await grammars.grammar(regex("a"), card)
    [child] = grammars._children
    child._process.kill()
    child._process.wait()
    assert "b" in await grammars.grammar(regex("b"), card)
    assert child not in grammars._children


async def test_a_process_that_is_killed_at_its_work_says_nothing_of_a_grammar(
    grammars: Grammars, card: ModelCard
) -> None:
    await grammars.grammar(regex("a"), card)
    [child] = grammars._children
    child._process.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(grammars.grammar(regex("b"), card))
    await asyncio.sleep(0.05)
    child._process.kill()
    with pytest.raises(Unavailable, match="died"):
        await asked
    assert "b" in await grammars.grammar(regex("b"), card)


async def test_many_that_explode_at_once_are_refused_in_time(
    grammars: Grammars, card: ModelCard
) -> None:
    """Each costs what one may compute and no new process."""
    await grammars.grammar(regex("a"), card)
    begun_s = time.monotonic()
    schemas = [json.dumps(EXPLODES | {"title": str(n)}) for n in range(6)]
    asked = [Constraint(GrammarKind.JSON_SCHEMA, text, "response_format") for text in schemas]
    found = await asyncio.gather(
        *(grammars.grammar(one, card) for one in asked), return_exceptions=True
    )
    took_s = time.monotonic() - begun_s
    problems = [str(one) for one in found]
    assert all("too complex" in one for one in problems), problems
    assert took_s < 7 * len(asked) * COMPUTE_S and len(grammars._children) <= 2
    assert "c" in await grammars.grammar(regex("c"), card)


async def test_a_process_that_was_kept_from_computing_says_nothing_of_a_grammar(
    grammars: Grammars, card: ModelCard
) -> None:
    """Otherwise a good one that once met a busy machine would be refused for ever."""
    await grammars.grammar(regex("a"), card)
    [child] = grammars._children
    child._process.send_signal(signal.SIGSTOP)
    with pytest.raises(Overloaded, match="too busy"):
        await grammars.grammar(regex("b"), card)
    assert "b" in await grammars.grammar(regex("b"), card)


async def test_what_is_kept_is_bounded(card: ModelCard) -> None:
    grammars = Grammars(PoolLimits(kept=2))
    try:
        for text in ("a", "b", "a", "c"):
            await grammars.grammar(regex(text), card)
        assert [text for _, text, _ in grammars._kept] == ["a", "c"]
    finally:
        grammars.close()
