"""The same tokens whatever the split, the neighbours, the batch and the memory."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.integration.clients import Answer, RawClient, ask, events, token_ids
from tests.stack import Stack, at_least, metrics, until

WORDS = "one two three four five six seven eight nine ten fox dog France Paris relay block"
PREEMPTIONS = "kvrelay_preemptions_total"
Request = tuple[str, dict[str, Any]]


def mixed_requests(count: int) -> list[Request]:
    """Lengths from 1 to 700 tokens and every sampling parameter, chat and plain."""
    rng = random.Random("32 mixed requests")
    return [mixed(rng, number) for number in range(count)]


def mixed(rng: random.Random, number: int) -> Request:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randrange(2**63)}
    body |= rng.choice(
        (
            {"temperature": 0},
            {"temperature": 0.8},
            {"temperature": 1.3, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20},
            {"temperature": 1.5, "min_p": 0.05, "top_p": 0.95},
        )
    )
    body |= rng.choice(
        (
            {},
            {"ignore_eos": True},
            {"stop": [" a", "e", "\n"], "min_tokens": rng.randint(0, body["max_tokens"])},
            {"stop": "the"},
            {"stop_token_ids": rng.sample(range(400), 40), "min_tokens": 1},
            {"n": rng.choice((2, 3))},
        )
    )
    if number % 3 == 0:
        text = " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 60)))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    length = rng.choice((1, 2, 15, 16, 17, 33, 64, 100, 250, 700))
    return "/v1/completions", body | {"prompt": token_ids(rng, length)}


def all_at_once(stack: Stack, requests: list[Request]) -> list[Answer]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return [*pool.map(lambda request: ask(stack, *request), requests)]


def streamed(requests: list[Request]) -> list[Request]:
    """Every second one as a stream."""
    return [(path, body | {"stream": at % 2 == 0}) for at, (path, body) in enumerate(requests)]


def test_32_together_answer_as_each_alone_and_as_unsplit(split: Stack, unsplit: Stack) -> None:
    requests = mixed_requests(32)
    alone = [ask(unsplit, *request) for request in requests]
    assert {reason for answer in alone for reason in answer.finishes} == {"stop", "length"}
    assert all_at_once(split, streamed(requests)) == alone
    assert all_at_once(unsplit, streamed(requests)) == alone
    assert [ask(split, *request) for request in requests] == alone


def test_small_pools_that_preempt_change_no_token(small: Stack, unsplit: Stack) -> None:
    rng = random.Random("preempt")
    requests = [
        (
            "/v1/completions",
            {
                "prompt": token_ids(rng, rng.randint(60, 180)),
                "max_tokens": 120,
                "ignore_eos": True,
                "temperature": 0.7,
                "seed": number,
            },
        )
        for number in range(12)
    ]
    (decode,) = small.decodes
    before = metrics(decode)[PREEMPTIONS]
    together = all_at_once(small, streamed(requests))
    assert metrics(decode)[PREEMPTIONS] > before, "the pool never ran dry: nothing was tested"
    assert together == all_at_once(unsplit, requests)


def test_a_seed_holds_whatever_runs_beside_it(split: Stack) -> None:
    prompt = token_ids(random.Random("seeded"), 40)
    seeded = {"prompt": prompt, "temperature": 0.8, "seed": 42, "max_tokens": 24}
    alone = [ask(split, "/v1/completions", seeded) for _ in range(2)]
    assert alone[0] == alone[1]
    for length in (4, 60):  # neighbours that end earlier, and later
        for _ in range(3):
            unseeded = {"prompt": prompt, "temperature": 0.8, "max_tokens": length}
            beside = [("/v1/completions", unseeded)] * 2
            answers = all_at_once(split, [("/v1/completions", seeded), *beside])
            assert answers[0] == alone[0]


def test_no_seed_draws_another_answer_each_time(split: Stack) -> None:
    body = {"prompt": token_ids(random.Random("unseeded"), 20), "max_tokens": 24, "n": 3}
    answers = [ask(split, "/v1/completions", body) for _ in range(2)]
    assert len({text for answer in answers for text in answer.texts}) == 6


def test_a_request_id_of_the_client_is_a_label_only(split: Stack, unsplit: Stack) -> None:
    """Two at once with one id, then the id again and again."""
    rng = random.Random("same id")
    bodies = [
        {"model": split.model, "prompt": token_ids(rng, 20 + at), "max_tokens": 12, "seed": at}
        for at in range(22)
    ]

    def send(body: dict[str, Any]) -> str:
        url, headers = f"{split.url}/v1/completions", {"x-request-id": "mine"}
        response = split.http.post(url, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["x-request-id"] == "mine"
        return str(response.json()["choices"][0]["text"])

    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(send, bodies[:2])]
    texts += [send(body) for body in bodies[2:]]
    assert texts == [ask(unsplit, "/v1/completions", body).texts[0] for body in bodies]


@pytest.mark.parametrize(
    "changed",
    [
        {"min_tokens": 50, "max_tokens": 100, "stop_token_ids": [*range(100)]},
        {"min_tokens": 2, "max_tokens": 2},
        {"n": 2, "max_tokens": 1},
        {"n": 2, "min_tokens": 10, "max_tokens": 12, "stop": "e"},
    ],
    ids=["min_tokens", "min_is_max", "n_of_one_token", "n_with_stop"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_one_leg_needs_is_invisible(
    split: Stack, unsplit: Stack, changed: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": token_ids(random.Random("legs"), 30), "seed": 5, **changed, "stream": stream}
    answer = ask(split, "/v1/completions", body)
    assert answer == ask(unsplit, "/v1/completions", body)
    assert answer.usage["completion_tokens"] >= changed.get("min_tokens", 1) * changed.get("n", 1)


def test_an_aborted_prompt_is_not_found_in_the_cache(split: Stack, unsplit: Stack) -> None:
    """B05: what was cancelled before it was computed must not be hit as a prefix."""
    (prefill,) = split.prefills
    rng = random.Random("poison")
    computed = 'kvrelay_computed_tokens_total{kind="prompt"}'
    for number in range(12):
        body = {
            "prompt": token_ids(rng, 400),
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        enough = metrics(prefill)[computed] + rng.choice((1, 64, 128, 256))
        client = RawClient(split, {**body, "stream": number % 2 == 0})
        until(at_least(prefill, computed, enough), 10.0, "it is being computed")
        client.leave(reset=number % 3 == 0)
        assert ask(split, "/v1/completions", body) == ask(unsplit, "/v1/completions", body)


def test_usage_counts_a_prompt_once_for_all_its_choices(split: Stack) -> None:
    body = {"prompt": token_ids(random.Random("n"), 30), "seed": 1, "ignore_eos": True}
    many = ask(split, "/v1/completions", {**body, "n": 3, "max_tokens": 5})
    assert many.usage == {"prompt_tokens": 30, "completion_tokens": 15, "total_tokens": 45}
    first = ask(split, "/v1/completions", {**body, "max_tokens": 5})
    assert first.texts == many.texts[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_once_for_the_logprobs_of_all_choices(
    split: Stack, unsplit: Stack, stream: bool
) -> None:
    """Also when it is cached, which the other choices use at once and the first may not."""
    prompt = token_ids(random.Random(f"told {stream}"), 320)
    body: dict[str, Any] = {"prompt": prompt, "n": 4, "seed": 3, "max_tokens": 6, "stream": stream}
    body |= {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    (prefill,) = split.prefills
    computed = 'kvrelay_computed_tokens_total{kind="prompt"}'
    for _ in range(2):
        before = metrics(prefill)[computed]
        told = prompt_told(split, body)
        assert metrics(prefill)[computed] - before < 1.2 * len(prompt)
        assert len(told) == 4 and all(one == told[0] for one in told)
        echoed, of_prompt = told[0]
        assert len(of_prompt) == len(echoed) == len(prompt) and None not in echoed[1:]
        assert told == prompt_told(unsplit, body)


def prompt_told(stack: Stack, body: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    """By choice: logprobs of the echoed prompt's tokens, and `prompt_logprobs`."""
    url = f"{stack.url}/v1/completions"
    response = stack.http.post(url, json={"model": stack.model, **body})
    assert response.status_code == 200, response.text
    if body["stream"]:
        choices = [
            c for event in events(iter(response.text.splitlines())) for c in event["choices"]
        ]
    else:
        choices = response.json()["choices"]
    firsts = {c["index"]: c for c in reversed(choices)}
    count = len(body["prompt"])
    return [
        (firsts[at]["logprobs"]["token_logprobs"][:count], firsts[at]["prompt_logprobs"])
        for at in sorted(firsts)
    ]
