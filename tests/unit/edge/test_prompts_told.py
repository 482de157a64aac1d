"""Logprobs of a prompt are computed with its first choice, and told with each."""

from __future__ import annotations

import json
import random

import pytest

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import CompletionBody
from kvrelay.services.router.prompts_told import PromptsTold
from kvrelay.services.router.validate import ModelCard, Origin, valid_completion
from kvrelay.shared.types import LegSpec, Logprobs, ValidRequest


def asked(card: ModelCard, **fields: object) -> ValidRequest:
    body = {"model": "tiny", "prompt": ["abc", "xyz"], "n": 3, **fields}
    return valid_completion(
        parse_body(CompletionBody, json.dumps(body).encode()), card, Origin("r", 7)
    )


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
def test_only_the_first_choice_of_a_prompt_asks(card: ModelCard, fields: dict[str, object]) -> None:
    legs = asked(card, **fields).legs
    assert [leg.sampling.prompt_logprobs for leg in legs] == [2, None, None] * 2
    assert len({leg.sampling.logprobs for leg in legs}) == 1


def said(legs: tuple[LegSpec, ...], tokens: int) -> list[list[TokenEvent]]:
    """What the workers say of each leg, in order."""
    told = {0: (Logprobs(-1.0, 1), Logprobs(-2.0, 2)), 3: (Logprobs(-3.0, 3),)}
    return [
        [
            TokenEvent(leg, index, 9, None, None, told[leg] if leg in told and not index else ())
            for index in range(tokens)
        ]
        for leg in range(len(legs))
    ]


def test_however_they_come_each_is_told_it_with_its_first_token(card: ModelCard) -> None:
    legs = asked(card, prompt_logprobs=0).legs
    for seed in range(200):
        rng = random.Random(seed)
        waiting, prompts, passed = said(legs, 3), PromptsTold(legs), list[TokenEvent]()
        while any(waiting):
            at = rng.choice([leg for leg, left in enumerate(waiting) if left])
            passed += prompts.take(waiting[at].pop(0))
        for leg in range(len(legs)):
            of_leg = [event for event in passed if event.leg == leg]
            assert [event.index for event in of_leg] == [0, 1, 2]
            first = next(event for event in passed if event.leg == leg - leg % 3)
            assert of_leg[0].prompt_logprobs == first.prompt_logprobs != ()
            assert not any(event.prompt_logprobs for event in of_leg[1:])
            assert passed.index(first) <= passed.index(of_leg[0])


def test_nothing_is_kept_when_nobody_asks(card: ModelCard) -> None:
    legs = asked(card).legs
    prompts = PromptsTold(legs)
    event = TokenEvent(2, 0, 9)
    assert prompts.take(event) == [event]


def test_a_prompt_of_one_token_has_none_to_wait_for(card: ModelCard) -> None:
    legs = asked(card, prompt=[[1]], prompt_logprobs=0).legs
    prompts = PromptsTold(legs)
    assert prompts.take(TokenEvent(1, 0, 9)) == []
    assert [event.leg for event in prompts.take(TokenEvent(0, 0, 9))] == [0, 1]
