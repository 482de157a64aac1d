"""The routes about tokens, and what this server says of itself."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay import __version__
from kvrelay.services.router.openai.api import create_app
from kvrelay.services.router.openai.generate import EdgeSettings
from kvrelay.services.router.template import ChatTemplate

HI = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("text", ["hello world", "🙂 né", "a\x00b", " ", "<|im_end|>x", ""])
async def test_tokenizing_and_back(client: httpx.AsyncClient, cluster: Any, text: str) -> None:
    told = (await client.post("/tokenize", json={"prompt": text, "model": "tiny"})).json()
    assert told["count"] == len(told["tokens"])
    assert (told["max_model_len"], told["token_strs"]) == (200, None)
    back = await client.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_prompts_tokens_are_those_it_is_computed_with(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "hello world"}),
        ("/v1/chat/completions", {"messages": HI}),
    ):
        await client.post(path, json={"model": "tiny", **fields})
        told = (await client.post("/tokenize", json=fields)).json()
        assert tuple(told["tokens"]) == cluster.requests[-1].legs[0].prompt


async def test_the_text_of_each_token(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello wo", "return_token_strs": True, "add_special_tokens": False}
    told = (await client.post("/tokenize", json=body)).json()
    assert told["token_strs"] == ["hello", " w", "o"]
    chat = {"messages": HI, "return_token_strs": True}
    told = (await client.post("/tokenize", json=chat)).json()
    assert told["token_strs"][0] == "<|im_start|>" and len(told["token_strs"]) == told["count"]


async def test_a_large_text_is_tokenized_off_the_loop_and_in_turn(
    client: httpx.AsyncClient, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = type(card.tokenizer).encode

    def watched(self: Any, text: str, add_special: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special)

    monkeypatch.setattr(type(card.tokenizer), "encode", watched)
    small, large = ({"prompt": "x" * size} for size in (10, EdgeSettings().inline_bytes))
    answers = await asyncio.gather(
        *(client.post("/tokenize", json=body) for body in (small, large, large))
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert threads[0] == threading.get_ident() and threading.get_ident() not in threads[1:]


async def test_what_the_tokenizer_is(client: httpx.AsyncClient, card: Any) -> None:
    told = (await client.get("/tokenizer_info")).json()
    assert told["model"] == "tiny"
    assert told["identity"] == card.tokenizer.identity
    assert (told["vocab_size"], told["max_model_len"]) == (265, 200)
    assert (told["bos_token"], told["eos_token"], told["add_bos_token"]) == (
        None,
        "<|im_end|>",
        False,
    )
    assert told["eos_token_ids"] == list(card.tokenizer.special.eos_token_ids)
    assert told["special_token_ids"] == sorted(card.tokenizer.special_ids)
    assert "<|im_start|>" in told["chat_template"]


async def test_what_this_server_is_and_does(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}
    assert (await client.get("/load")).json() == {"server_load": 0, "queued": 0}


async def test_a_template_that_takes_long_runs_off_the_loop(cluster: Any, card: Any) -> None:
    threads: list[int] = []

    class Watched(ChatTemplate):
        def render(self, *arguments: Any, **named: Any) -> str:
            threads.append(threading.get_ident())
            return super().render(*arguments, **named)

    loops = "{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}hello"
    slow = replace(card, template=Watched(loops, "", ""))
    app = create_app(cluster, lambda: slow)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://edge"
    ) as client:
        body = {"model": "tiny", "messages": HI}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]
    assert len(cluster.requests[0].legs[0].prompt) == 1
