"""Answers that must be something are it, whoever draws their tokens and whoever dies meanwhile."""

from __future__ import annotations

import json
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tests.integration.clients import Answer, ask, token_ids
from tests.integration.test_failover import OUTPUTS, busy, lost, retries
from tests.stack import Stack, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "kind": {"enum": ["été", "冬", "🍂"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
SCHEMA["properties"]["counts"] |= {"minItems": 2, "maxItems": 5}
LONG_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{6}$"},
    "minItems": 40,
    "maxItems": 40,
}


def formatted(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    return {"response_format": wanted, "max_tokens": 900, **more}


def documents(answer: Answer, schema: dict[str, Any]) -> None:
    for text, finish in zip(answer.texts, answer.finishes, strict=True):
        assert finish == "stop", (finish, text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_same_document_split_or_not_streamed_or_not(
    split: Stack, unsplit: Stack, temperature: float
) -> None:
    body = formatted(SCHEMA, temperature=temperature, seed=5, n=2)
    body["messages"] = [{"role": "user", "content": "Which season?"}]
    whole = ask(split, CHAT, body)
    documents(whole, SCHEMA)
    assert ask(split, CHAT, {**body, "stream": True}) == whole == ask(unsplit, CHAT, body)


@pytest.mark.leaks_allowed
def test_a_decode_worker_is_lost_in_mid_document(tcp: Stack, unsplit: Stack) -> None:
    before = retries(tcp)
    requests = [
        formatted(LONG_SCHEMA, prompt=token_ids(random.Random(n), 50), seed=n, stream=True)
        for n in range(3)
    ]
    enough = tcp.counted(tcp.decodes, OUTPUTS) + 60
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, tcp, TEXT, request) for request in requests]

        until(lambda: tcp.counted(tcp.decodes, OUTPUTS) >= enough, 20.0, "tokens flow")
        with lost(tcp, busy(tcp.decodes), signal.SIGKILL):
            together = [answer.result() for answer in answers]
    assert retries(tcp) > before
    for request, answer in zip(requests, together, strict=True):
        documents(answer, LONG_SCHEMA)
        assert answer == ask(unsplit, TEXT, request)


def test_other_forms(split: Stack) -> None:
    def said(**wanted: Any) -> str:
        answer = ask(split, TEXT, {"prompt": "one two", "max_tokens": 300, "seed": 3, **wanted})
        assert answer.finishes == ("stop",)
        return answer.texts[0]

    assert said(structured_outputs={"choice": ["yes", "no", "ça va"]}) in ("yes", "no", "ça va")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2,4}", said(guided_regex="[0-9]{3}-[a-f]{2,4}"))
    grammar = 'root ::= "<" word ("," word)? ">"\nword ::= [a-z] [a-z]'
    assert re.fullmatch(r"<[a-z]{2}(,[a-z]{2})?>", said(structured_outputs={"grammar": grammar}))


def test_one_that_no_worker_could_enforce_is_refused_at_once(split: Stack) -> None:
    body = formatted({"type": "array", "uniqueItems": True}, prompt="one", stream=True)
    refused = split.post(TEXT, **body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in error["message"]
