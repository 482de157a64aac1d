"""A stream says the same as a whole answer, field by field, whatever is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.shared.types import FinishReason

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

flags = st.booleans()
counts = st.integers(0, 4)
both: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "stop": st.lists(
        st.sampled_from(["a", "bé", "🙂", "é🙂a", "ab", "zz"]), min_size=1, max_size=2
    ),
    "min_tokens": st.sampled_from([0, 0, 1, 3]),
    "include_stop_str_in_output": flags,
    "skip_special_tokens": flags,
    "return_token_ids": flags,
    "prompt_logprobs": counts,
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 2, 5]),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "200"]), st.integers(-100, 100)),
    "bad_words": st.lists(st.sampled_from(["hello", "é"]), max_size=2),
    "seed": st.integers(-(2**63), 2**63 - 1),
}
texts = st.text("hé🙂 <", min_size=1, max_size=6) | st.just("a<|im_end|>b")
ids = st.lists(st.integers(0, 264), min_size=1, max_size=6)
completions: dict[str, st.SearchStrategy[Any]] = both | {
    "logprobs": counts,
    "echo": flags,
    "max_tokens": st.integers(0, 9),
    "prompt": texts | ids | st.lists(texts, min_size=1, max_size=3) | st.lists(ids, min_size=1),
}
chats: dict[str, st.SearchStrategy[Any]] = both | {
    "logprobs": flags,
    "top_logprobs": counts,
    "max_completion_tokens": st.integers(1, 9),
    "add_generation_prompt": flags,
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """One that is accepted, for either route."""
    path = draw(st.sampled_from([CHAT, COMPLETIONS]))
    fields = completions if path == COMPLETIONS else chats
    body = {name: draw(values) for name, values in fields.items() if draw(flags)}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": draw(texts)}]
        if not body.get("logprobs"):
            body.pop("top_logprobs", None)
    else:
        body.setdefault("prompt", "hi")
        if isinstance(body["prompt"], list):
            body["prompt"] = body["prompt"][:6]
        if body.get("max_tokens") == 0:
            body["echo"] = True
    limit = body.get("max_tokens", body.get("max_completion_tokens", 16))
    body["min_tokens"] = min(body.get("min_tokens", 0), limit)
    return path, {"model": "tiny"} | body


said = st.sampled_from(["a", "bé", "🙂", "é🙂a", "ab", "b\xff"]).map(str.encode) | st.sampled_from(
    [b"\xf0", b"\xff", b"he", b"hello", b"<|im_end|>"]
)
answers = st.tuples(st.lists(said, min_size=1, max_size=6), st.sampled_from(FinishReason))


def added_up(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream says piece by piece."""
    top = {k: v for event in events for k, v in event.items() if k.startswith("prompt_")}
    whole: dict[str, Any] = {"usage": events[-1]["usage"], **top}
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        add(choices.setdefault(choice["index"], {}), choice)
    for choice in choices.values():
        if path == CHAT:
            choice["message"] = choice.pop("delta") | {"refusal": None}
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def add(known: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        old = known.get(name)
        if old is None or name in ("index", "role"):
            known[name] = value
        elif isinstance(old, dict) and isinstance(value, dict):
            add(old, value)
        elif value is not None:
            assert name != "finish_reason", "told twice"
            known[name] = old + value


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def asked(app: FastAPI, path: str, body: dict[str, Any]) -> str:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.text


@pytest.fixture
def rig(app: FastAPI, cluster: Any) -> Callable[[list[bytes], FinishReason], FastAPI]:
    """An application whose every leg says this, in tokens of one byte or as they are, as far as it
    may."""

    def answering(said: list[bytes], end: FinishReason) -> FastAPI:
        tokens: list[int] = []
        for data in said:
            known = cluster.byte_ids.get(data)
            parts = [data[at : at + 1] for at in range(len(data))]
            tokens += [cluster.byte_ids[part] for part in parts] if known is None else [known]

        def script(request: Any) -> Any:
            limit = request.legs[0].sampling.max_tokens
            cut = len(tokens) + (end is FinishReason.STOP) > limit
            return cluster.drawing(tokens[:limit], FinishReason.LENGTH if cut else end)(request)

        cluster.script = script
        return app

    return answering


@settings(
    max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bodies(), answers)
def test_a_stream_adds_up_to_the_whole_answer(
    rig: Any, asked_for: tuple[str, dict[str, Any]], answer: tuple[list[bytes], FinishReason]
) -> None:
    path, body = asked_for
    streamed = body | {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }

    async def run() -> tuple[str, str]:
        app = rig(*answer)
        return await asked(app, path, body), await asked(app, path, streamed)

    whole_text, stream_text = asyncio.run(run())
    whole = strict(whole_text)
    *events, done, _ = stream_text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [strict(event.removeprefix("data: ")) for event in events]
    for name in ("id", "object", "created", "model"):
        del whole[name]
    assert added_up(path, chunks) == whole
    check_entries(path, body, whole)
    check_usage(chunks)


def check_entries(path: str, body: dict[str, Any], whole: dict[str, Any]) -> None:
    """Every token of an answer has exactly one entry, and its offset lies in the text."""
    counted = 0
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        if path == CHAT:
            counted += len(logprobs["content"]) if logprobs else 0
        elif logprobs:
            lengths = {len(entries) for entries in logprobs.values()}
            assert len(lengths) == 1
            offsets = logprobs["text_offset"]
            assert offsets == sorted(offsets)
            assert offsets[-1] <= len(choice["text"])
            counted += lengths.pop()
        if body.get("return_token_ids") and path == CHAT and logprobs:
            assert len(choice["token_ids"]) == len(logprobs["content"])
    asks = body.get("logprobs")
    if (path == CHAT and asks) or (path == COMPLETIONS and asks is not None):
        echoed = whole["usage"]["prompt_tokens"] * body.get("n", 1) if body.get("echo") else 0
        assert counted == echoed + whole["usage"]["completion_tokens"]


def check_usage(chunks: list[dict[str, Any]]) -> None:
    told = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts)
    assert counts[-2] == counts[-1]
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in told)
