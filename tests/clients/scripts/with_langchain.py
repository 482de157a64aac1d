"""`langchain-openai`: chat model, stream, an agent with a tool, structured output."""

from __future__ import annotations

from typing import Literal

from checks import BASE, CAPITAL, KEY, MODEL, SAYS, run
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(
    base_url=BASE, api_key=KEY, model=MODEL, temperature=0, max_tokens=64, stream_usage=True
)


class City(BaseModel, extra="forbid"):
    """A city."""

    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]


@tool
def get_weather(unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather here."""
    return f"sunny, 20 degrees {unit}"


def invoke_answers() -> str:
    answer = llm.invoke(CAPITAL)
    assert SAYS in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    return answer.content


def stream_gives_what_invoke_does() -> str:
    chunks = list(llm.stream(CAPITAL))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == llm.invoke(CAPITAL).content
    assert whole.usage_metadata["output_tokens"] > 0
    return f"{len(chunks)} chunks"


def logprobs_are_in_the_metadata() -> None:
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(CAPITAL)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(answer.content)


def batch_answers_all() -> None:
    answers = llm.batch([CAPITAL, "Say hello.", "Count to three."])
    assert all(answer.content for answer in answers)


def the_completions_model_answers() -> None:
    plain = OpenAI(base_url=BASE, api_key=KEY, model=MODEL, temperature=0, max_tokens=8)
    text = plain.invoke("The capital of France is")
    assert text and text == "".join(plain.stream("The capital of France is"))


def a_forced_tool_is_called_in_a_stream_too() -> None:
    forced = llm.bind_tools([get_weather], tool_choice="get_weather")
    (call,) = forced.invoke("The weather?").tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["unit"] in ("celsius", "fahrenheit")
    chunks = list(forced.stream("The weather?"))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]


def an_agent_calls_its_tool_and_answers() -> str:
    @wrap_model_call
    def first_call_then_answer(request, handler):  # a small model calls nothing on its own
        called = any(isinstance(message, ToolMessage) for message in request.messages)
        choice = "none" if called else "required"
        once = {"parallel_tool_calls": False}
        return handler(request.override(tool_choice=choice, model_settings=once))

    agent = create_agent(llm, tools=[get_weather], middleware=[first_call_then_answer])
    messages = agent.invoke({"messages": [("user", "The weather, please?")]})["messages"]
    _, calling, *results, last = messages
    assert len(results) == len(calling.tool_calls) > 0
    assert all(r.content.startswith("sunny, 20 degrees") for r in results)
    assert isinstance(last, AIMessage) and last.content and not last.tool_calls
    return messages[-1].content[:60]


def structured_output_by_schema() -> str:
    city = llm.with_structured_output(City, method="json_schema").invoke(CAPITAL)
    assert isinstance(city, City)
    return repr(city)


def structured_output_by_a_function_call() -> str:
    city = llm.with_structured_output(City, method="function_calling").invoke(CAPITAL)
    assert isinstance(city, City)
    return repr(city)


run(
    invoke_answers,
    stream_gives_what_invoke_does,
    logprobs_are_in_the_metadata,
    batch_answers_all,
    the_completions_model_answers,
    a_forced_tool_is_called_in_a_stream_too,
    an_agent_calls_its_tool_and_answers,
    structured_output_by_schema,
    structured_output_by_a_function_call,
)
