"""KV memory really crosses UCX, and only when it has to."""

from __future__ import annotations

import random

import pytest
from tests.integration.clients import ask, token_ids
from tests.stack import Process, Stack, metrics, until

BLOCK_BYTES = 2 * 2 * 2 * 64 * 16 * 2  # layers, K and V, heads, dim, slots, bytes of a bfloat16
SENT, RECEIVED = (f'kvrelay_relay_bytes_total{{direction="{way}"}}' for way in ("sent", "received"))
HITS = 'kvrelay_prefix_cache_tokens_total{result="hit"}'
COMPUTED = 'kvrelay_computed_tokens_total{kind="prompt"}'
LENGTHS = [k * 16 + off for k in (1, 2, 3, 4) for off in (-1, 0, 1)]


def relayed(stack: Stack) -> tuple[int, int]:
    return stack.counted(stack.prefills, SENT), stack.counted(stack.decodes, RECEIVED)


@pytest.mark.parametrize(
    ("stack", "rails"), [("split", {"posix", "sysv", "cma"}), ("tcp", {"tcp"})], indirect=["stack"]
)
def test_the_relay_names_its_transport(stack: Stack, rails: set[str]) -> None:
    for worker in stack.workers:
        said = worker.detail["relay"]
        assert said.startswith("ucx (")
        named = set(said.removeprefix("ucx (").rstrip(")").replace(" ", "").split(","))
        assert named & rails
    if rails == {"tcp"}:
        assert not named & {"posix", "sysv", "cma"}


@pytest.mark.parametrize("stack", ["split", "tcp"], indirect=True)
@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 900])
def test_bytes_relayed_are_blocks_times_block_bytes(stack: Stack, tokens: int) -> None:
    prompt = token_ids(random.Random(f"bytes {tokens}"), tokens)
    sent, received = relayed(stack)
    ask(stack, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
    expected = -(-tokens // 16) * BLOCK_BYTES
    until(stack.baseline, 2.0, "the answer is over")
    assert relayed(stack) == (sent + expected, received + expected)


def test_a_prefix_that_decode_holds_is_not_relayed_again(split: Stack) -> None:
    rng = random.Random("shared prefix")
    head = token_ids(rng, 64)
    ask(split, "/v1/completions", {"prompt": head + token_ids(rng, 8), "max_tokens": 2})
    until(split.baseline, 2.0, "the answer is over")
    before, hits = relayed(split), [metrics(worker)[HITS] for worker in split.workers]
    ask(split, "/v1/completions", {"prompt": head + token_ids(rng, 8), "max_tokens": 2})
    until(split.baseline, 2.0, "the answer is over")
    assert relayed(split) == (before[0] + BLOCK_BYTES, before[1] + BLOCK_BYTES)
    assert [metrics(worker)[HITS] for worker in split.workers] == [hit + 64 for hit in hits]


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_is_answered_without_decode(split: Stack, stream: bool) -> None:
    (decode,) = split.decodes
    before = counters(decode)
    prompt = token_ids(random.Random("one"), 40)
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": stream}
    one = ask(split, "/v1/completions", {**body, "max_tokens": 1})
    assert (one.finishes, one.usage["completion_tokens"]) == (("length",), 1)
    assert counters(decode) == before
    two = ask(split, "/v1/completions", {**body, "max_tokens": 2})
    assert (two.finishes, two.usage["completion_tokens"]) == (("length",), 2)
    assert two.texts[0].startswith(one.texts[0])


def counters(worker: Process) -> dict[str, float]:
    return {name: value for name, value in metrics(worker).items() if "kvrelay" in name}


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_ends_the_answer_ends_it_on_prefill(split: Stack, stream: bool) -> None:
    prompt = token_ids(random.Random("first token"), 48)
    body = {"prompt": prompt, "temperature": 0, "stream": stream}
    plain = ask(split, "/v1/completions", {**body, "max_tokens": 1, "ignore_eos": True})
    by_text = ask(split, "/v1/completions", {**body, "max_tokens": 50, "stop": plain.texts[0]})
    assert (by_text.texts, by_text.finishes) == (("",), ("stop",))
    every_id = [*range(128)], [*range(128, 256)], [*range(256, 384)], [*range(384, 400)]
    ended = [
        ask(split, "/v1/completions", {**body, "max_tokens": 50, "stop_token_ids": ids})
        for ids in every_id
    ]
    at_once = [answer for answer in ended if answer.usage["completion_tokens"] == 1]
    assert [(answer.texts, answer.finishes) for answer in at_once] == [(("",), ("stop",))]


@pytest.mark.parametrize("stack", ["split", "unsplit"], indirect=True)
def test_a_full_prefix_hit_still_computes_the_last_token(stack: Stack) -> None:
    for length in LENGTHS:
        prompt = token_ids(random.Random(f"full hit {length}"), length)
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        first = ask(stack, "/v1/completions", body)
        before = stack.counted(stack.prefills or stack.workers, COMPUTED)
        assert [ask(stack, "/v1/completions", body) for _ in range(2)] == [first] * 2
        assert stack.counted(stack.prefills or stack.workers, COMPUTED) - before == 2
