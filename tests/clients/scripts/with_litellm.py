"""`litellm`, by both of its names for servers that speak OpenAI's language."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import litellm
from checks import BASE, CAPITAL, KEY, MODEL, SAYS, WEATHER, run
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": CAPITAL}]
CHAT = {"api_base": BASE, "api_key": KEY, "messages": ASK, "temperature": 0, "max_tokens": 64}
PROVIDERS = ("openai", "hosted_vllm")


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]


def chat(provider: str = "openai", **more: Any) -> Any:
    return litellm.completion(model=f"{provider}/{MODEL}", **{**CHAT, **more})


def completion_answers_by_either_provider() -> str:
    texts = {chat(provider).choices[0].message.content for provider in PROVIDERS}
    (text,) = texts
    assert SAYS in text
    return text


def streams_are_what_completion_gives() -> None:
    for provider in PROVIDERS:
        options = {"include_usage": True}
        chunks = list(chat(provider, stream=True, stream_options=options))
        built = litellm.stream_chunk_builder(chunks, messages=ASK)
        whole = chat(provider)
        assert built.choices[0].message.content == whole.choices[0].message.content
        assert built.usage.completion_tokens == whole.usage.completion_tokens


def the_async_client_streams() -> None:
    async def count() -> int:
        stream = await litellm.acompletion(model=f"openai/{MODEL}", stream=True, **CHAT)
        return len([chunk async for chunk in stream])

    assert asyncio.run(count()) > 2


def text_completion_with_logprobs() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        api_base=BASE,
        api_key=KEY,
        max_tokens=4,
        temperature=0,
        logprobs=1,
    )
    (choice,) = answer.choices
    assert "".join(choice.logprobs.tokens) == choice.text


def penalties_and_vllms_own_fields_pass() -> None:
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    assert chat("hosted_vllm", presence_penalty=0.5, extra_body=more).choices[0].message.content


def a_required_tool_is_called() -> None:
    answer = chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert {"city", "unit"} == json.loads(call.function.arguments).keys()


def a_pydantic_response_format_is_held() -> str:
    content = chat(response_format=City).choices[0].message.content
    return repr(City.model_validate_json(content))


def errors_are_its_own() -> None:
    try:
        chat(temperature=9)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("no BadRequestError")


run(
    completion_answers_by_either_provider,
    streams_are_what_completion_gives,
    the_async_client_streams,
    text_completion_with_logprobs,
    penalties_and_vllms_own_fields_pass,
    a_required_tool_is_called,
    a_pydantic_response_format_is_held,
    errors_are_its_own,
)
