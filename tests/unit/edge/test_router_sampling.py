"""What the fields of a body ask of the sampler and of the answer, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import ChatBody, CompletionBody
from kvrelay.services.router.template import ChatTemplate
from kvrelay.services.router.validate import ModelCard, Origin, valid_chat, valid_completion
from kvrelay.shared.errors import RequestError
from kvrelay.shared.types import AnswerForm, SamplingParams, ValidRequest

ORIGIN = Origin(request_id="r", seed=7)
USER = {"role": "user", "content": "hi"}


def completion(card: ModelCard, **fields: Any) -> ValidRequest:
    body = json.dumps({"model": "tiny", "prompt": "x"} | fields).encode()
    return valid_completion(parse_body(CompletionBody, body), card, ORIGIN)


def chat(card: ModelCard, **fields: Any) -> ValidRequest:
    body = json.dumps({"model": "tiny", "messages": [USER]} | fields).encode()
    return valid_chat(parse_body(ChatBody, body), card, ORIGIN)


def text_of(card: ModelCard, ids: tuple[int, ...]) -> str:
    return b"".join(map(card.tokenizer.token_bytes, ids)).decode()


def test_what_shapes_the_distribution_arrives(card: ModelCard) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"260": -100, "3": 1.5},
        "allowed_token_ids": [9, 3, 9],
        "prompt_logprobs": 4,
    }
    wanted = SamplingParams(
        seed=7,
        max_tokens=5,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias=((3, 1.5), (260, -100.0)),
        allowed_token_ids=(3, 9),
        prompt_logprobs=4,
    )
    for request in (completion(card, **fields), chat(card, **fields)):
        assert request.legs[0].sampling == wanted
        assert request.form == AnswerForm(prompt_logprobs=4)


def test_a_bad_word_is_banned_at_the_front_and_behind_a_space(card: ModelCard) -> None:
    banned = completion(card, bad_words=["wx", "  hello", "hello"]).legs[0].sampling.bad_words
    # " hello" is a space and "hello": banning "hello" alone bans it, too.
    assert [text_of(card, ids) for ids in banned] == ["wx", " wx", "hello"]
    assert [len(ids) for ids in banned] == [2, 2, 1]


@pytest.mark.parametrize(
    ("fields", "drawn", "told"),
    [
        ({}, (None, None), (None, None)),
        ({"logprobs": 0}, (0, None), (0, None)),
        ({"logprobs": False}, (None, None), (None, None)),
        ({"logprobs": 20, "echo": True}, (20, 20), (20, None)),
        ({"logprobs": 1, "echo": True, "prompt_logprobs": 3}, (1, 3), (1, 3)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 0}, (3, 3), (3, 0)),
        ({"echo": True}, (None, None), (None, None)),
        ({"best_of": 2}, (0, None), (None, None)),
        ({"best_of": 2, "n": 2}, (None, None), (None, None)),
        ({"best_of": 2, "logprobs": 2}, (2, None), (2, None)),
    ],
)
def test_which_logprobs_are_drawn_and_which_are_told(
    card: ModelCard, fields: dict[str, Any], drawn: Any, told: Any
) -> None:
    request = completion(card, **fields)
    sampling, form = request.legs[0].sampling, request.form
    assert (sampling.logprobs, sampling.prompt_logprobs) == drawn
    assert (form.logprobs, form.prompt_logprobs) == told


def test_chat_has_two_fields_for_logprobs(card: ModelCard) -> None:
    for fields, told in [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ]:
        request = chat(card, **fields)
        assert (request.form.logprobs, request.legs[0].sampling.logprobs) == (told, told)


def test_how_an_answer_is_told_is_the_routers_alone(card: ModelCard) -> None:
    request = completion(
        card,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        return_token_ids=True,
        stream=True,
        stream_options={"continuous_usage_stats": True},
    )
    assert request.form == AnswerForm(
        include_stop=True, show_special=True, token_ids=True, continuous_usage=True
    )
    assert request.legs == completion(card).legs


def test_best_of_makes_more_legs_than_choices(card: ModelCard) -> None:
    request = completion(card, prompt=["x", "y"], n=2, best_of=3)
    assert [leg.choice for leg in request.legs] == [0, 1, 2, 0, 1, 2]
    assert (request.form.choices, request.form.candidates) == (2, 3)


def test_of_a_prompt_alone_one_token_is_drawn(card: ModelCard) -> None:
    request = completion(card, echo=True, max_tokens=0, logprobs=1)
    assert request.form.prompt_only
    assert request.legs[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("given", "kept", "wanted"),
    [("abcdef", 2, "ef"), ("abc", 9, "abc"), ([1] * 300, 150, 150), ([1] * 300, -1, 184)],
)
def test_a_prompt_is_cut_at_its_front(
    card: ModelCard, given: Any, kept: int, wanted: str | int
) -> None:
    request = completion(card, prompt=given, truncate_prompt_tokens=kept, echo=True)
    prompt = request.legs[0].prompt
    assert request.prompt_tokens == len(prompt)
    assert (text_of(card, prompt) if isinstance(wanted, str) else len(prompt)) == wanted
    assert request.form.echo == (
        b"".join(map(card.tokenizer.token_bytes, prompt)).decode("utf-8", "replace"),
    )


def test_a_text_that_is_far_too_long_is_cut_and_not_refused(card: ModelCard) -> None:
    request = completion(card, prompt="x" * 50_000 + "end", truncate_prompt_tokens=5)
    assert text_of(card, request.legs[0].prompt) == "xxend"
    words = "hello w " * 4000
    request = completion(card, prompt=words, truncate_prompt_tokens=60)
    assert list(request.legs[0].prompt) == card.tokenizer.encode(words, False)[-60:]
    request = chat(card, messages=[USER] * 40, truncate_prompt_tokens=-1, max_tokens=50)
    assert request.prompt_tokens == 150
    assert text_of(card, request.legs[0].prompt).endswith("<|im_start|>assistant\n")


def test_the_echo_of_a_text_is_that_text_and_of_ids_what_they_spell(card: ModelCard) -> None:
    end = card.tokenizer.special.eos_token_ids[-1]
    hello = card.tokenizer.encode("hello", False)
    assert completion(card, prompt=["a<|im_end|>", "é"], echo=True).form.echo == (
        "a<|im_end|>",
        "é",
    )
    assert completion(card, prompt=[[*hello, end]], echo=True).form.echo == ("hello",)
    shown = completion(card, prompt=[[*hello, end]], echo=True, skip_special_tokens=False)
    assert shown.form.echo == ("hello<|im_end|>",)


def test_a_chat_can_end_without_a_new_turn_or_inside_the_last_one(card: ModelCard) -> None:
    said = [USER, {"role": "assistant", "content": "Well,  "}]
    begun = chat(card, messages=said, add_generation_prompt=False)
    assert text_of(card, begun.legs[0].prompt).endswith("assistant\nWell,  <|im_end|>\n")
    for fields in ({}, {"add_generation_prompt": False}):
        open_ = chat(card, messages=said, continue_final_message=True, **fields)
        assert text_of(card, open_.legs[0].prompt).endswith("assistant\nWell,  ")


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (CompletionBody, {"presence_penalty": 2.1}, "presence_penalty"),
    (CompletionBody, {"frequency_penalty": -2.1}, "frequency_penalty"),
    (ChatBody, {"frequency_penalty": True}, "frequency_penalty"),
    (CompletionBody, {"repetition_penalty": 0}, "repetition_penalty"),
    (CompletionBody, {"repetition_penalty": 2.5}, "repetition_penalty"),
    (CompletionBody, {"logit_bias": {"265": 1}}, "logit_bias"),
    (CompletionBody, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (CompletionBody, {"logit_bias": {"abc": 1}}, "logit_bias"),
    (CompletionBody, {"logit_bias": {"01": 1}}, "logit_bias"),
    (CompletionBody, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (CompletionBody, {"logit_bias": {"1": 1e9}}, "logit_bias.1"),
    (CompletionBody, {"logit_bias": {"1": True}}, "logit_bias.1"),
    (CompletionBody, {"logit_bias": [1]}, "logit_bias"),
    (CompletionBody, {"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    (CompletionBody, {"allowed_token_ids": []}, "allowed_token_ids"),
    (CompletionBody, {"allowed_token_ids": [0, 265]}, "allowed_token_ids[1]"),
    (CompletionBody, {"allowed_token_ids": [0] * 4097}, "allowed_token_ids"),
    (CompletionBody, {"allowed_token_ids": [264], "min_tokens": 1}, "allowed_token_ids"),
    (CompletionBody, {"allowed_token_ids": [65], "bad_words": ["b"]}, "allowed_token_ids"),
    (CompletionBody, {"bad_words": [""]}, "bad_words[0]"),
    (CompletionBody, {"bad_words": ["a", "  "]}, "bad_words[1]"),
    (CompletionBody, {"bad_words": ["a"] * 129}, "bad_words"),
    (CompletionBody, {"bad_words": ["a" * 257]}, "bad_words[0]"),
    (CompletionBody, {"logprobs": 21}, "logprobs"),
    (CompletionBody, {"logprobs": -1}, "logprobs"),
    (CompletionBody, {"logprobs": True}, "logprobs"),
    (ChatBody, {"logprobs": 1}, "logprobs"),
    (ChatBody, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (ChatBody, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    (ChatBody, {"echo": True}, "echo"),
    (ChatBody, {"best_of": 2}, "best_of"),
    (ChatBody, {"max_tokens": 0}, "max_tokens"),
    (CompletionBody, {"top_logprobs": 2}, "top_logprobs"),
    (CompletionBody, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (CompletionBody, {"prompt": [[1] * 199] * 128, "prompt_logprobs": 20}, "prompt_logprobs"),
    (CompletionBody, {"prompt": [[1] * 199] * 128, "logprobs": 20, "echo": True}, "logprobs"),
    (CompletionBody, {"best_of": 1, "n": 2}, "best_of"),
    (CompletionBody, {"best_of": 2, "stream": True}, "best_of"),
    (CompletionBody, {"best_of": 10**6}, "best_of"),
    (CompletionBody, {"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
    (CompletionBody, {"suffix": "x"}, "suffix"),
    (CompletionBody, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    (CompletionBody, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    (CompletionBody, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (CompletionBody, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (CompletionBody, {"truncate_prompt_tokens": 201}, "truncate_prompt_tokens"),
    (CompletionBody, {"truncate_prompt_tokens": 200, "prompt": [1] * 999}, "prompt"),
    (CompletionBody, {"add_generation_prompt": False}, "add_generation_prompt"),
    (CompletionBody, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (
        ChatBody,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (ChatBody, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (ChatBody, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (ChatBody, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    (ChatBody, {"chat_template_kwargs": {"a": [0] * 1025}}, "chat_template_kwargs"),
    (ChatBody, {"chat_template_kwargs": {"a": {"x" * 9000: "y" * 9000}}}, "chat_template_kwargs"),
    (
        ChatBody,
        {"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}},
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: str(case[1])[:48])
def test_a_wrong_value_is_a_400_that_names_its_field(
    card: ModelCard, case: tuple[type[Any], dict[str, Any], str]
) -> None:
    kind, fields, param = case
    with pytest.raises(RequestError) as caught:
        (completion if kind is CompletionBody else chat)(card, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).startswith(param.partition("[")[0]) or param == "prompt"


def test_variables_of_a_template_are_its_alone_and_forge_nothing(
    card: ModelCard, tokenizer: Any
) -> None:
    source = "{{ messages[0].content }}{{ style }}{{ more.deep[0] }}{{ add_generation_prompt }}"
    styled = replace(card, template=ChatTemplate(source, "", ""))
    kwargs = {"style": "<|im_end|>", "more": {"deep": ["<|im_start|>"]}}
    prompt = chat(styled, chat_template_kwargs=kwargs).legs[0].prompt
    assert text_of(card, prompt) == "hi<|im_end|><|im_start|>True"
    assert not tokenizer.special_ids & {*prompt}


def test_what_is_collected_of_many_answers_is_bounded(card: ModelCard) -> None:
    roomy = replace(card, max_model_len=100_000)
    many: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "n": 128}
    with pytest.raises(RequestError, match=r"at most 4194304 .* a smaller max_tokens, or a stream"):
        chat(roomy, **many)
    assert chat(roomy, **many, max_tokens=1000).form.choices == 128
    assert chat(roomy, **many, stream=True).form.choices == 128
    with pytest.raises(RequestError, match="best_of: at most"):
        completion(roomy, best_of=128, max_tokens=99_000)


async def test_numbers_without_bounds_are_refused_over_http(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}}
    response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logit_bias")
    assert error["message"] == "logit_bias: at most 1024 of them (given: 100000)"
