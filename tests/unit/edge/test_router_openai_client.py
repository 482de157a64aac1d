"""OpenAI's own client against the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.errors import Overloaded, WorkerFailed


@pytest.fixture
async def ai(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


TEXT = "Paris\u2028, où 🙂"


async def test_chat(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    cluster.script = cluster.saying(TEXT)
    answer = await ai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Where?"}]
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1


async def test_chat_stream(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    cluster.script = cluster.saying(TEXT)
    stream = await ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Where?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    events = [event async for event in stream]
    deltas = [event.choices[0].delta for event in events if event.choices]
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert events[-2].choices[0].finish_reason == "stop"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(TEXT.encode()) + 1


async def test_completions(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    cluster.script = cluster.saying(TEXT)
    answer = await ai.completions.create(model="tiny", prompt=["a", "b"], n=2, stop=["🙂"])
    assert [choice.text for choice in answer.choices] == ["Paris\u2028, où "] * 4
    stream = await ai.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([event.choices[0].text async for event in stream]) == TEXT


async def test_logprobs_of_a_chat(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    cluster.script = cluster.saying(TEXT)
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Where?"}],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    answer = await ai.chat.completions.create(**asked)
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        *said, end = choice.logprobs.content
        assert end.token == "<|im_end|>"
        assert b"".join(bytes(one.bytes or ()) for one in said).decode() == TEXT
        assert {len(one.top_logprobs) for one in said} == {2}
    stream = await ai.chat.completions.create(**asked, stream=True)
    told: dict[int, list[Any]] = {0: [], 1: []}
    async for event in stream:
        for piece in event.choices:
            if piece.logprobs is not None:
                told[piece.index] += piece.logprobs.content or []
    assert told == {
        choice.index: choice.logprobs.content for choice in answer.choices if choice.logprobs
    }


async def test_an_echo_with_logprobs(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    cluster.script = cluster.saying("x")
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["hé", "a"], "echo": True, "logprobs": 2}
    answer = await ai.completions.create(**asked, max_tokens=0)
    assert [choice.text for choice in answer.choices] == ["hé", "a"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len("hé".encode())
    best = await ai.completions.create(**asked, n=1, best_of=3, max_tokens=2)
    assert [(choice.index, choice.text) for choice in best.choices] == [(0, "héx"), (1, "ax")]


async def test_models(ai: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in ai.models.list()] == ["tiny", "org/tiny"]
    assert (await ai.models.retrieve("org/tiny")).id == "org/tiny"


async def test_errors_have_the_clients_types(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await ai.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await ai.completions.create(model="tiny", prompt="x" * 500, stream=True)
    assert wrong.value.code == "context_length_exceeded"
    cluster.script = lambda request: [Overloaded("full", retry_after_s=0.5)]
    with pytest.raises(openai.RateLimitError):
        await ai.completions.create(model="tiny", prompt="a")


async def test_a_failure_inside_a_stream_is_raised(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    token = TokenEvent(0, 0, cluster.byte_ids[b"x"])
    cluster.script = lambda request: [token, WorkerFailed("gone")]
    stream = await ai.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="failed while it handled this request"):
        assert [event.choices[0].text async for event in stream] == ["x"]


async def test_leaving_a_stream_closes_the_generation(ai: openai.AsyncOpenAI, cluster: Any) -> None:
    token = cluster.byte_ids[b"x"]
    cluster.script = lambda request: (TokenEvent(0, index, token) for index in range(10**9))
    stream = await ai.completions.create(model="tiny", prompt="a", stream=True)
    assert (await anext(aiter(stream))).choices[0].text == "x"
    await stream.close()
    await cluster.generations[0].closed.wait()
    assert cluster.generations[0].closes == 1
