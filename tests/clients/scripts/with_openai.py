"""`openai`, as its documentation uses it."""

from __future__ import annotations

import json
from typing import Literal

import openai
from checks import BASE, CAPITAL, KEY, MODEL, SAYS, WEATHER, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": CAPITAL}]


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]


def models_are_listed_and_found() -> str:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    assert listed.id == MODEL
    return listed.id


def chat_answers() -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=24, user="u", metadata={"a": "b"}
    )
    (choice,) = answer.choices
    assert SAYS in choice.message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return choice.message.content


def chat_streams_what_it_answers() -> None:
    settled = {"model": MODEL, "messages": ASK, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**settled).choices[0].message.content
    with client.chat.completions.create(
        **settled, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-1].usage.completion_tokens > 0


def the_stream_helper_ends_with_the_whole_answer() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=City, temperature=0, max_tokens=400
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "".join(deltas)
    assert isinstance(message.parsed, City)


def several_choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, n=3, seed=7, max_tokens=8, logprobs=True, top_logprobs=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        told = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        # The end token is told too.
        assert told.decode(errors="replace").startswith(choice.message.content)
        assert all(len(token.top_logprobs) == 5 for token in choice.logprobs.content)


def completions_with_echo_and_logprobs() -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=4, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text.startswith(prompt)
    assert "".join(choice.logprobs.tokens[: answer.usage.prompt_tokens]) == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def completions_of_several_prompts_stream() -> None:
    prompts = ["One, two,", "Red, green,"]
    settled = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 6}
    whole = [choice.text for choice in client.completions.create(**settled).choices]
    texts = ["", ""]
    for chunk in client.completions.create(**settled, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def a_required_tool_is_called() -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert {"city", "unit"} == json.loads(call.function.arguments).keys()
    return call.function.arguments


def a_named_tool_streams_its_arguments_and_takes_a_result() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=named, max_tokens=400
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert {"city", "unit"} == json.loads(call.function.arguments).keys()
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*ASK, message, result], tools=[WEATHER], max_tokens=16
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def json_mode_gives_json() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me of Paris, as JSON."}],
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def parse_gives_the_pydantic_object() -> str:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, max_tokens=400, temperature=0
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    return repr(parsed)


def a_parsed_answer_can_be_sent_back() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, max_tokens=400, temperature=0
    )
    more = [*ASK, answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    assert client.chat.completions.create(model=MODEL, messages=more, max_tokens=4).choices


def parse_gives_the_arguments_of_a_pydantic_tool() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, City)


def wrong_requests_are_its_own_errors() -> None:
    for error, body in (
        (openai.BadRequestError, {"model": MODEL, "messages": ASK, "temperature": 9}),
        (openai.NotFoundError, {"model": "no-such", "messages": ASK}),
    ):
        try:
            client.chat.completions.create(**body)
        except error as found:
            assert found.param == ("temperature" if "temperature" in body else "model")
        else:
            raise AssertionError(f"no {error.__name__}")


run(
    models_are_listed_and_found,
    chat_answers,
    chat_streams_what_it_answers,
    the_stream_helper_ends_with_the_whole_answer,
    several_choices_and_logprobs,
    completions_with_echo_and_logprobs,
    completions_of_several_prompts_stream,
    a_required_tool_is_called,
    a_named_tool_streams_its_arguments_and_takes_a_result,
    json_mode_gives_json,
    parse_gives_the_pydantic_object,
    a_parsed_answer_can_be_sent_back,
    parse_gives_the_arguments_of_a_pydantic_tool,
    wrong_requests_are_its_own_errors,
)
