"""Ten turns of a chat: what each computes, and what its usage says of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.integration.clients import delta_text, events, token_ids
from tests.stack import Stack, metrics_at, until

from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import ChatBody
from kvrelay.services.router.validate import ModelCard, Origin, model_card, valid_chat
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer
from kvrelay.shared.kv.index import shared_tokens

COMPUTED = 'kvrelay_computed_tokens_total{kind="prompt"}'
CHAT = "/v1/chat/completions"
BLOCK, TURNS, ANSWER_TOKENS = 16, 10, 40
WORDS = ["one", "two", "three", "fox", "dog", "France", "Paris", "relay", "block", "ready"]


@pytest.fixture(scope="session")
def card(tiny_model: Path) -> ModelCard:
    return model_card(["tiny"], load_tokenizer(tiny_model), 2048, 0)


class Chat:
    """A conversation whose tokens are known: each has a text of its own, the others are banned.

    That are the beginnings of characters and a control token. Of the 128 bytes that are no text by
    themselves one is not banned, for there is no more room; it reads as U+FFFD.
    """

    def __init__(self, stack: Stack, card: ModelCard) -> None:
        self._stack = stack
        self._card = card
        ids = range(card.vocab_size)
        texts = {id: card.tokenizer.token_bytes(id) for id in ids}
        self._ids = {text.decode(errors="replace"): id for id, text in texts.items()}
        (rest,) = (id for id, text in texts.items() if text == b"\x80")
        self._ids["\ufffd"] = rest
        partial = [id for id, text in texts.items() if not text.isascii() and id != rest]
        self._banned = sorted({*partial, *card.tokenizer.special_ids})
        self._messages: list[dict[str, str]] = []
        self.known: list[int] = []
        """Prompt and answer of the last turn."""

    def turn(self, text: str, **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """(the prompt's tokens, usage) of one question and its answer."""
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
        banned = [id for id in self._banned if id not in self._card.tokenizer.special.eos_token_ids]
        body |= {"min_tokens": ANSWER_TOKENS, "stop_token_ids": banned, "stream": True}
        body |= {"model": self._stack.model, "stream_options": {"include_usage": True}}
        prompt = self._prompt(body)
        with self._stack.http.stream("POST", f"{self._stack.url}{CHAT}", json=body) as stream:
            assert stream.status_code == 200, stream.read()
            *told, last = events(stream.iter_lines())
        pieces = [text for event in told for c in event["choices"] if (text := delta_text(c))]
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        answer = [self._ids[piece] for piece in pieces]
        assert len(answer) == ANSWER_TOKENS
        self.known = [*prompt, *answer]
        return prompt, last["usage"]

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        wire = parse_body(ChatBody, json.dumps({**body, "model": "tiny"}).encode())
        return list(valid_chat(wire, self._card, Origin("r", 0)).legs[0].prompt)


def questions(seed: str) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=8)) for _ in range(TURNS)]


def computed(stack: Stack) -> int:
    until(stack.baseline, 2.0, "the answer is over")
    return stack.counted(stack.workers, COMPUTED)


def attempts(stack: Stack) -> dict[str, float]:
    """By cause: a prompt whose first attempt was lost is computed twice."""
    page = metrics_at(f"{stack.url}/metrics")
    return {name: value for name, value in page.items() if "attempts_total" in name}


def local_routes(stack: Stack) -> float:
    return metrics_at(f"{stack.url}/metrics").get('kvrelay_routes_total{route="local"}', 0)


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stack", ["split", "unsplit"], indirect=True)
def test_usage_says_what_was_not_computed(stack: Stack, card: ModelCard) -> None:
    """As many tokens as the workers' own counters did not grow by."""
    chat = Chat(stack, card)
    for question in questions("a chat"):
        before = computed(stack)
        prompt, usage = chat.turn(question)
        assert usage["prompt_tokens"] == len(prompt)
        grown = computed(stack) - before
        assert grown == len(prompt) - cached(usage), attempts(stack)


def test_a_turn_computes_what_the_last_one_did_not_have(
    split: Stack, unsplit: Stack, card: ModelCard
) -> None:
    """And at most a block more: answers are found again, whoever wrote them.

    Who wrote them goes on with them, as long as that is the way to the earliest first token: of a
    tiny model on a busy machine it need not be.
    """
    with split.behind("auto", route="auto") as auto:
        for stack in (auto, unsplit):
            chat = Chat(stack, card)
            kept = 0
            for question in questions("another chat"):
                known, before = chat.known, local_routes(stack)
                prompt, usage = chat.turn(question)
                if local_routes(stack) > before:
                    kept += 1
                    new = len(prompt) - shared_tokens(known, prompt)
                    assert len(prompt) - cached(usage) <= new + BLOCK
                until(stack.baseline, 2.0, "the answer is over")
            assert kept > TURNS / 2


@pytest.mark.parametrize("stack", ["split", "unsplit"], indirect=True)
def test_the_choices_of_a_prompt_share_what_one_of_them_computed(stack: Stack) -> None:
    """One prompt of 50 tokens for three choices is 50 tokens; the next time 49 are there."""
    prompt = token_ids(random.Random("choices"), 50)
    body = {"prompt": prompt, "n": 3, "max_tokens": 4, "ignore_eos": True}
    body["cache_salt"] = "choices"  # other prompts may begin with the same token
    assert cached(stack.complete(**body)["usage"]) == 0
    assert cached(stack.complete(**body)["usage"]) == 49


@pytest.mark.parametrize("stack", ["split", "unsplit"], indirect=True)
def test_another_cache_salt_shares_nothing(stack: Stack) -> None:
    prompt = token_ids(random.Random("salted"), 50)

    def cached_with(**salt: str) -> int:
        return cached(stack.complete(prompt, max_tokens=2, ignore_eos=True, **salt)["usage"])

    assert cached_with(cache_salt="a") == 0
    assert cached_with(cache_salt="b") == 0
    assert cached_with() < BLOCK  # other prompts may begin with the same token
    assert cached_with(cache_salt="a") == 49
