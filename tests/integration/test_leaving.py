"""A client may leave at any moment: within a second nobody holds anything for it (L6)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from tests.integration.clients import RawClient, token_ids
from tests.stack import Process, Stack, at_least, metrics, until

TIMES = 20
LIMIT_S = 1.0
STRAGGLER_S = 4.0
"""For one of twenty on a machine that has much else to do."""
COMPUTED = 'kvrelay_computed_tokens_total{kind="prompt"}'
OUTPUTS = 'kvrelay_computed_tokens_total{kind="output"}'
ARRIVED = 'kvrelay_relay_blocks_total{direction="received"}'
WAITING = "kvrelay_requests_waiting"


@dataclass(frozen=True)
class Phase:
    """When a client leaves: one counter of one worker has risen by `after`, not by `whole`."""

    role: str
    counter: str
    after: int
    whole: int
    prompt_tokens: int
    max_tokens: int = 2
    events: int = 0
    """Of a stream, read before anything else."""


PHASES = {
    "prefill": Phase("prefill", COMPUTED, after=32, whole=1200, prompt_tokens=1200),
    "transfer": Phase("decode", ARRIVED, after=2, whole=75, prompt_tokens=1200),
    "first token": Phase(
        "decode", ARRIVED, after=2, whole=1000, prompt_tokens=32, max_tokens=1000, events=1
    ),
    "mid-decode": Phase(
        "decode", OUTPUTS, after=10, whole=1000, prompt_tokens=32, max_tokens=1000, events=8
    ),
}


def risen(worker: Process, counter: str, start: float) -> float:
    return metrics(worker)[counter] - start


@dataclass
class Times:
    """How long until all was free again, each time."""

    seconds: list[float]

    def check(self) -> None:
        late = [seconds for seconds in self.seconds if seconds > LIMIT_S]
        assert len(late) <= 1, f"held for {late} s after the client had left"


@pytest.fixture
def times() -> Iterator[Times]:
    measured = Times([])
    yield measured
    measured.check()


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES.keys())
def test_what_a_client_held_is_free_again(split: Stack, times: Times, phase: Phase) -> None:
    rng = random.Random("leaving")
    worker = (split.prefills if phase.role == "prefill" else split.decodes)[0]
    hits = 0
    for number in range(3 * TIMES):
        stream = number % 2 == 0
        start = metrics(worker)[phase.counter]
        prompt = token_ids(rng, phase.prompt_tokens)
        body = {"prompt": prompt, "max_tokens": phase.max_tokens, "ignore_eos": True}
        client = RawClient(split, {**body, "stream": stream})
        if stream and phase.events:
            client.read_events(phase.events)
        else:
            until(at_least(worker, phase.counter, start + phase.after), 10.0, "the phase")
        client.leave(reset=number % 4 < 2)
        times.seconds.append(until(split.baseline, STRAGGLER_S, "all is free again"))
        # A client that left too late for its phase was answered; it does not count.
        hits += risen(worker, phase.counter, start) < phase.whole
        if hits == TIMES:
            return
    raise AssertionError(f"only {hits} of {3 * TIMES} clients left in the phase")


@contextmanager
def decode_is_full(stack: Stack) -> Iterator[None]:
    """Eight choices that run for long take every seat at decode."""
    body = {"prompt": [7, 8, 9], "n": 8, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    client = RawClient(stack, body)
    running = at_least(stack.decodes[0], "kvrelay_requests_running", 8)
    until(running, 10.0, "eight choices run")
    yield
    assert running(), "they still run"
    client.leave()


def test_a_client_may_leave_while_it_is_queued(split: Stack, times: Times) -> None:
    rng = random.Random("queued")
    with decode_is_full(split):
        for number in range(TIMES):
            body = {"prompt": token_ids(rng, 64), "max_tokens": 4, "stream": number % 2 == 0}
            client = RawClient(split, body)
            for worker in split.workers:
                until(at_least(worker, WAITING, 1), 5.0, "it waits on both workers")
            computed = split.counted(split.workers, COMPUTED)
            client.leave(reset=number % 4 < 2)
            times.seconds.append(
                until(
                    lambda: all(metrics(worker)[WAITING] == 0 for worker in split.workers),
                    STRAGGLER_S,
                    "nobody waits any more",
                )
            )
            assert split.counted(split.workers, COMPUTED) == computed
    times.seconds.append(until(split.baseline, STRAGGLER_S, "all is free again"))


def test_twenty_that_leave_at_once(split: Stack, times: Times) -> None:
    """In whatever phase each of them is."""
    rng = random.Random("at once")
    for _ in range(3):
        clients = [
            RawClient(
                split,
                {
                    "prompt": token_ids(rng, rng.choice((1, 40, 300))),
                    "max_tokens": 500,
                    "n": rng.choice((1, 1, 2)),
                    "ignore_eos": True,
                    "stream": bool(number % 2),
                },
            )
            for number in range(TIMES)
        ]
        until(at_least(split.decodes[0], "kvrelay_requests_running", 4), 10.0, "some run")
        for client in clients:
            client.leave()
        times.seconds.append(until(split.baseline, STRAGGLER_S, "all is free again"))
