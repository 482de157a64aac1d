"""`instructor`: pydantic objects in each of its modes that an OpenAI server serves."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import BASE, CAPITAL, KEY, MODEL, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": CAPITAL}]


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]


def create(mode: instructor.Mode) -> str:
    city = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=ASK, response_model=City, max_retries=0, max_tokens=80, temperature=0
    )
    assert isinstance(city, City)
    return repr(city)


def by_tools() -> str:
    return create(instructor.Mode.TOOLS)


def by_strict_tools() -> str:
    return create(instructor.Mode.TOOLS_STRICT)


def by_json_schema() -> str:
    return create(instructor.Mode.JSON_SCHEMA)


def partial_objects_stream() -> str:
    stream = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    parts = list(
        stream.chat.completions.create_partial(
            model=MODEL, messages=ASK, response_model=City, max_tokens=80, temperature=0
        )
    )
    assert City.model_validate(parts[-1].model_dump())
    return f"{len(parts)} parts"


run(by_tools, by_strict_tools, by_json_schema, partial_objects_stream)
