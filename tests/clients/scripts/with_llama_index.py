"""`llama-index`, by its class for servers that speak OpenAI's language."""

import asyncio
from typing import Literal

from checks import BASE, CAPITAL, KEY, MODEL, SAYS, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class City(BaseModel, extra="forbid"):
    """A city."""

    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]


def get_weather(unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather here."""
    return f"sunny, 20 degrees {unit}"


def llm(**more: bool) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE,
        api_key=KEY,
        context_window=2048,
        max_tokens=64,
        temperature=0,
        max_retries=0,
        **{"is_chat_model": True, **more},
    )


ASK = [ChatMessage(role="user", content=CAPITAL)]


def chat_answers() -> str:
    answer = llm().chat(ASK).message.content
    assert SAYS in answer
    return answer


def stream_chat_gives_what_chat_does() -> None:
    *_, last = llm().stream_chat(ASK)
    assert last.message.content == llm().chat(ASK).message.content


def complete_streams_what_it_answers() -> None:
    plain = llm(is_chat_model=False)
    *_, last = plain.stream_complete("The capital of France is")
    assert last.text == plain.complete("The capital of France is").text != ""


def async_chats_run_side_by_side() -> None:
    async def several() -> list[str]:
        answers = await asyncio.gather(*(llm().achat(ASK) for _ in range(3)))
        return [answer.message.content for answer in answers]

    assert len(set(asyncio.run(several()))) == 1


def a_required_tool_is_called() -> str:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm(is_function_calling_model=True).predict_and_call(
        [tool], "The weather?", tool_required=True
    )
    assert answer.response.startswith("sunny, 20 degrees")
    return answer.response


def structured_predict_gives_the_object() -> str:
    for flags in ({"is_function_calling_model": True}, {"should_use_structured_outputs": True}):
        city = llm(**flags).as_structured_llm(City).chat(ASK).raw
        assert isinstance(city, City)
    return repr(city)


run(
    chat_answers,
    stream_chat_gives_what_chat_does,
    complete_streams_what_it_answers,
    async_chats_run_side_by_side,
    a_required_tool_is_called,
    structured_predict_gives_the_object,
)
