"""The OpenAPI document says what happens: its routes, bodies, answers and statuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fastapi import FastAPI
from starlette.routing import Route
from tests.unit.edge.test_router_errors import NEUTRAL as NEUTRAL_BODIES

from kvrelay.services.router.openai.openapi import openapi_document
from kvrelay.services.router.openai.schema import IGNORED, NEUTRAL, ChatBody, CompletionBody

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def document(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    yield (await client.get("/openapi.json")).json()


def schema(document: dict[str, Any], name: str) -> Any:
    ref = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.validator_for(ref)


def test_it_is_a_valid_document() -> None:
    for with_metrics in (True, False):
        for with_keys in (True, False):
            document = openapi_document(with_metrics=with_metrics, with_keys=with_keys)
            text = json.dumps(document)
            assert text.count('"$ref"') > 50
            for part in text.split('"$ref": "#/components/schemas/')[1:]:
                assert part.partition('"')[0] in document["components"]["schemas"]
            for one in document["components"]["schemas"].values():
                jsonschema_rs.meta.validate(one)
            assert ("/metrics" in document["paths"]) == with_metrics
            assert ('"401"' in text) == ('"security"' in text) == with_keys


async def test_it_has_the_routes_that_there_are(app: FastAPI, document: dict[str, Any]) -> None:
    there = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.router.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    told = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert told == there


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_it_names_every_field_that_a_body_may_have(body: Any) -> None:
    document = openapi_document(with_metrics=True, with_keys=False)
    told = document["components"]["schemas"][body.__name__]
    assert told["properties"].keys() == body.model_fields.keys() | IGNORED | NEUTRAL.keys()
    assert told["additionalProperties"] is False


RIGHT: list[dict[str, Any]] = [
    *NEUTRAL_BODIES,
    {"prompt": ["a", "b"]},
    {"prompt": [1, 2]},
    {"prompt": [[1], [2]]},
    *({"logprobs": value} for value in (False, None)),
    {"stop": None},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"stream": True, "stream_options": {"include_usage": True}},
]
WRONG: list[dict[str, Any]] = [
    *({"prompt": value} for value in ("", [], [[]], [""], {"a": 1}, [1, "a"], [-1], ["a"] * 129)),
    *({"max_tokens": value} for value in (-1, "16", 2**63)),
    *({"temperature": value} for value in (-0.1, 2.1, "hot")),
    *({"stop": value} for value in ("", [""], ["a"] * 17, 5, "x" * 1025)),
    *({"n": value} for value in (0, 129)),
    *({"logprobs": value} for value in (-1, 21, True, "1")),
    {"no_such_field": 1},
    {"model": ""},
    {"stream_options": {"every": 1}},
]


@pytest.mark.parametrize("fields", [*RIGHT, *WRONG], ids=lambda fields: str(fields)[:40])
async def test_what_one_field_may_be_is_what_it_is_told_to_be(
    client: httpx.AsyncClient, document: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": "hi", **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == (400 if fields in WRONG else 200), answer.text
    assert schema(document, "CompletionBody").is_valid(body) == (answer.status_code == 200)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        *((content, True) for content in ("", "hi", [{"type": "text", "text": "x"}])),
        *((content, False) for content in (5, [], [{"type": "image_url"}], [{"type": "text"}])),
    ],
)
async def test_what_a_message_may_be(
    client: httpx.AsyncClient, document: dict[str, Any], content: object, right: bool
) -> None:
    body = {"model": "tiny", "messages": [{**USER, "content": content, "tool_calls": None}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code == 200) == right
    assert schema(document, "ChatBody").is_valid(body) == right


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/v1/models", "Models"), ("/v1/models/tiny", "Model"), ("/version", "Version")),
        *(("/load", "Load"), ("/health", "Health"), ("/ready", "Readiness")),
        *(("/tokenizer_info", "TokenizerFacts"), ("/v1/models/none", "Error")),
    ],
)
async def test_answers_have_the_shape_they_are_told_to_have(
    client: httpx.AsyncClient, document: dict[str, Any], path: str, name: str
) -> None:
    schema(document, name).validate((await client.get(path)).json())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/completions", "Completion", {"prompt": "hi"}),
        ("/v1/chat/completions", "ChatCompletion", {"messages": [USER]}),
    ],
)
async def test_generated_answers_too(
    client: httpx.AsyncClient,
    document: dict[str, Any],
    path: str,
    name: str,
    fields: dict[str, Any],
    stream: bool,
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.post(path, json={"model": "tiny", "n": 2, **fields, **options})
    if not stream:
        schema(document, name).validate(answer.json())
        return
    check = schema(document, f"{name}Chunk")
    *events, _, _ = answer.text.split("\n\n")
    assert len(events) > 10
    for event in events:
        check.validate(json.loads(event.removeprefix("data: ")))
