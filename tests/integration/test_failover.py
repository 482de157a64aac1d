"""Parts die, freeze and come back: answers that can be continued are, with the same tokens."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from tests.integration.clients import Answer, Neighbour, ask, token_ids
from tests.stack import Process, Stack, at_least, metrics, metrics_at, until

TEXT = "/v1/completions"
RUNNING = "kvrelay_requests_running"
OUTPUTS = 'kvrelay_computed_tokens_total{kind="output"}'
COMPUTED = 'kvrelay_computed_tokens_total{kind="prompt"}'
LONG: dict[str, Any] = {
    "prompt": token_ids(random.Random("failover"), 90),
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 78,
}
SHORT: dict[str, Any] = {
    "prompt": token_ids(random.Random("short"), 40),
    "max_tokens": 8,
    "seed": 4,
}


@pytest.fixture(scope="session")
def reference(stacks: dict[str, Stack]) -> dict[str, Answer]:
    """What an undisturbed, unsplit run gives."""
    unsplit = stacks["unsplit"]
    return {"long": ask(unsplit, TEXT, LONG), "short": ask(unsplit, TEXT, SHORT)}


@contextmanager
def lost(stack: Stack, worker: Process, number: signal.Signals) -> Iterator[None]:
    """Killed outright or frozen; started again or woken at the end, and seen by the router."""
    if number is signal.SIGKILL:
        worker.end(number)
    else:
        worker.kill(number)
    try:
        yield
    finally:
        if number is signal.SIGKILL:
            worker.start()
        else:
            worker.kill(signal.SIGCONT)
        until(stack.all_seen, 10.0, "the router sees all workers again")


def retries(stack: Stack) -> float:
    """Attempts that replaced one that was lost, whoever noticed it first."""
    page = metrics_at(f"{stack.url}/metrics")
    begun = {name: value for name, value in page.items() if "attempts_total" in name}
    return sum(begun.values()) - begun['kvrelay_attempts_total{cause="first"}']


def busy(workers: list[Process]) -> Process:
    """The one that runs something."""
    running: list[Process] = []

    def found() -> bool:
        running[:] = [worker for worker in workers if metrics(worker)[RUNNING]]
        return bool(running)

    until(found, 10.0, "one of them runs")
    return running[0]


def varied_requests(tokens: int, seed: str, answer: int = 120) -> list[dict[str, Any]]:
    """Kinds of requests that the death of a worker cuts in two; another seed, nothing cached."""
    rng = random.Random(f"varied {seed}")
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"seed": 1, "temperature": 1.2, "top_p": 0.9},
        {"seed": 2, "n": 2},
        {"seed": 3, "min_tokens": 60, "stop": ["e", " "]},
    )
    base = {"max_tokens": answer, "ignore_eos": True, "stream": True}
    return [{**base, "prompt": token_ids(rng, tokens), **kind} for kind in kinds]


def ask_all(stack: Stack, requests: list[dict[str, Any]]) -> list[Answer]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return [*pool.map(lambda request: ask(stack, TEXT, request), requests)]


@pytest.mark.leaks_allowed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_decode_is_lost_in_mid_answer(tcp: Stack, unsplit: Stack, number: signal.Signals) -> None:
    requests, before = varied_requests(60, number.name, answer=400), retries(tcp)
    enough = tcp.counted(tcp.decodes, OUTPUTS) + 40
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, tcp, TEXT, request) for request in requests]
        until(lambda: tcp.counted(tcp.decodes, OUTPUTS) >= enough, 20.0, "tokens flow")
        with lost(tcp, busy(tcp.decodes), number):
            together = [answer.result() for answer in answers]
    assert retries(tcp) > before
    assert together == ask_all(unsplit, requests)


@pytest.mark.leaks_allowed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_prefill_is_lost_in_mid_prompt(tcp: Stack, unsplit: Stack, number: signal.Signals) -> None:
    requests, before = varied_requests(900, number.name), retries(tcp)
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, tcp, TEXT, request) for request in requests]
        with lost(tcp, busy(tcp.prefills), number):
            together = [answer.result() for answer in answers]
    assert retries(tcp) > before
    assert together == ask_all(unsplit, requests)


@pytest.mark.leaks_allowed
def test_the_only_decode_worker_dies_and_comes_back(
    split: Stack, reference: dict[str, Answer]
) -> None:
    """The answer it was in the middle of waits for it and goes on."""
    (decode,) = split.decodes
    enough = metrics(decode)[OUTPUTS] + 20
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, split, TEXT, {**LONG, "stream": True})
        until(at_least(decode, OUTPUTS, enough), 20.0, "it is in mid-answer")
        with lost(split, decode, signal.SIGKILL):
            until(lambda: not split.ready(), 5.0, "the router is not ready without it")
        assert answer.result() == reference["long"]
    assert ask(split, TEXT, SHORT) == reference["short"]


@pytest.mark.leaks_allowed
def test_the_only_prefill_worker_dies_and_comes_back(
    split: Stack, reference: dict[str, Answer]
) -> None:
    """Meanwhile decode computes prompts itself; an answer that was handed over notices nothing."""
    (prefill,) = split.prefills
    with Neighbour(split, LONG, reference["long"].texts[0]):
        with lost(split, prefill, signal.SIGKILL):
            assert ask(split, TEXT, SHORT) == reference["short"]
        before = metrics(prefill)[COMPUTED]
        assert ask(split, TEXT, SHORT) == reference["short"]
        assert metrics(prefill)[COMPUTED] >= before + len(SHORT["prompt"])


@pytest.mark.leaks_allowed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_redis_goes_away_and_comes_back(
    split: Stack, reference: dict[str, Answer], number: signal.Signals
) -> None:
    """For longer than any lease: running requests and new ones are served all the while."""
    with Neighbour(split, LONG, reference["long"].texts[0]):
        told = len(split.router.log.read_text())
        if number is signal.SIGKILL:
            split.valkey.end(number)
        else:
            split.valkey.kill(number)
        until(lambda: "last view of the cluster" in log_since(split, told), 10.0, "it is missed")
        with pytest.raises(AssertionError, match="a lease's time"):
            until(lambda: ask(split, TEXT, SHORT) != reference["short"], 2.0, "a lease's time")
        if number is signal.SIGKILL:
            split.start_valkey()
        else:
            split.valkey.kill(signal.SIGCONT)
        until(lambda: registered(split) == 2, 10.0, "both workers are registered again")
        until(lambda: "Redis answers again" in log_since(split, told), 10.0, "it is back")
        assert ask(split, TEXT, SHORT) == reference["short"]


def test_a_redis_that_was_wiped_takes_no_worker_with_it(
    split: Stack, reference: dict[str, Answer]
) -> None:
    before = retries(split)
    with Neighbour(split, LONG, reference["long"].texts[0]):
        with redis.Redis.from_url(split.redis_url) as client:
            client.flushall()
        assert ask(split, TEXT, SHORT) == reference["short"]
        until(lambda: registered(split) == 2, 10.0, "both workers are registered again")
        assert ask(split, TEXT, SHORT) == reference["short"]
    assert retries(split) == before


def registered(stack: Stack) -> int:
    with redis.Redis.from_url(stack.redis_url, socket_timeout=2) as client:
        return len([*client.scan_iter("*:worker:*")])


def log_since(stack: Stack, characters: int) -> str:
    return stack.router.log.read_text()[characters:]
