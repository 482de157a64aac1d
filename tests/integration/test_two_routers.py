"""Two routers on one Redis share the same workers: evenly, and nothing that they count drifts."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import Any, TypeAlias

import pytest
import redis
from tests.integration.clients import RawClient, token_ids
from tests.stack import START_S, Stack, metrics, running, until
from tests.tinymodel import write_tiny_model

from kvrelay.services.chaos.client import Answer, Leave, ask, get
from kvrelay.services.chaos.watch import place_of, samples
from kvrelay.shared.store.directory import ClusterSnapshot, ClusterStore
from kvrelay.shared.store.keys import ASSIGNED_TTL_MS, LEASE_MS, Keys

pytestmark = pytest.mark.leaks_allowed  # a router is started

KEYS = Keys("kvrelay")
PROMPT_TOKENS, ANSWER_TOKENS = 96, 24
UNEVEN = 1.3
ACCOUNTS = {
    "prefill": 'kvrelay_computed_tokens_total{kind="prompt"}',
    "decode": 'kvrelay_relay_blocks_total{direction="received"}',
}
QUEUED = "kvrelay_requests_waiting", "kvrelay_requests_running"

Routers: TypeAlias = tuple[Stack, Stack]


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = tmp_path_factory.mktemp("two_routers")
    model = write_tiny_model(folder / "model", layers=8)
    shape: dict[str, Any] = {"prefill": 2, "decode": 2, "kv_cache_memory_bytes": 64 << 20}
    shape |= {"threads": 1, "kernels": "reference"}
    with running(folder / "stack", model, **shape) as first, first.behind("two") as second:
        yield first, second


def work(stack: Stack) -> dict[str, float]:
    """What each worker counted of all that it was given. Requests are of one size."""
    return {
        worker.name: metrics(worker)[sample]
        for role, sample in ACCOUNTS.items()
        for worker in stack.workers
        if worker.name.startswith(role)
    }


async def ask_all(
    routers: Routers, bodies: list[dict[str, Any]], leaves: list[Leave | None], clients: int
) -> tuple[list[Answer], dict[str, float]]:
    """By turns through each router, so many at a time; also each worker's mean queue meanwhile."""
    places = [place_of(stack.router.detail["address"]) for stack in routers]
    queues: dict[str, list[float]] = {worker.name: [] for worker in routers[0].workers}

    async def watch() -> None:
        while True:
            for worker in routers[0].workers:
                page = samples(await get(place_of(worker.detail["metrics"]), "/metrics"))
                queues[worker.name].append(sum(page[name] for name in QUEUED))
            await asyncio.sleep(0.1)  # of a sampling, not a wait for something

    async def client(number: int) -> None:
        for at in range(number, len(bodies), clients):
            place = places[number % len(places)]
            answers[at] = await ask(place, bodies[at], leaves[at])

    answers: dict[int, Answer] = {}
    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(client, range(clients)))
    watching.cancel()
    return [answers[at] for at in range(len(bodies))], {
        name: mean(depths) for name, depths in queues.items()
    }


def uneven(by_worker: dict[str, float]) -> dict[str, float]:
    """The most that a worker of a role got, to the mean."""
    out = {}
    for role in ACCOUNTS:
        got = [amount for name, amount in by_worker.items() if name.startswith(role)]
        out[role] = max(got) / mean(got)
    return out


@pytest.mark.parametrize(
    ("cancels", "requests", "clients"),
    [(0.0, 200, 200), (0.4, 400, 32)],
    ids=["all at once", "some leave"],
)
def test_work_is_even_and_nothing_drifts(
    routers: Routers, cancels: float, requests: int, clients: int
) -> None:
    first, rng = routers[0], random.Random(f"two routers {cancels}")
    base: dict[str, Any] = {
        "model": first.model,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    bodies = [{**base, "prompt": token_ids(rng, PROMPT_TOKENS)} for _ in range(requests)]
    leaves = [
        Leave(rng.randint(1, ANSWER_TOKENS), rng.uniform(0.01, 2))
        if rng.random() < cancels
        else None
        for _ in bodies
    ]
    until(partial(at_rest, first), START_S, "all accounts begin at nothing")
    before = work(first)
    answers, queues = asyncio.run(ask_all(routers, bodies, leaves, clients))
    given = {name: amount - before[name] for name, amount in work(first).items()}

    stayed = [answer for answer, leave in zip(answers, leaves, strict=True) if leave is None]
    assert [answer.error for answer in stayed if answer.error or answer.ends != 1] == []
    assert sum(answer.left for answer in answers) >= cancels * requests / 4
    print(f"most to mean: given {uneven(given)}, queued {uneven(queues)}")
    assert max(uneven(given).values()) <= UNEVEN

    until(lambda: first.baseline() and routers[1].baseline(), 2.0, "nothing is held")
    until(partial(at_rest, first), LEASE_MS / 1e3, "all accounts are at nothing again")
    found = audit(first)
    assert (found["status"], found["findings"]) == (0, [])
    assert found["looked_at"]["routers"] == 2
    until(lambda: not assignments(first), 2 * ASSIGNED_TTL_MS / 1e3, "all assignments are gone")


def at_rest(stack: Stack) -> bool:
    return asyncio.run(accounts(stack)) == [(0, 0, 0)] * 4


def test_who_was_left_by_its_last_client_says_that_it_rests(routers: Routers) -> None:
    """A load that was reported in the middle of the last work is not what is left of it."""
    rng = random.Random("last work")
    for _ in range(3):
        prompt = token_ids(rng, PROMPT_TOKENS)
        client = RawClient(
            routers[0], {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        )
        until(partial(at_work, routers[0]), 5.0, "a worker has reported it")
        client.leave()
        until(partial(at_rest, routers[0]), LEASE_MS / 1e3, "nobody is said to be at work")


def at_work(stack: Stack) -> bool:
    return any(running for _, running, _ in asyncio.run(accounts(stack)))


async def accounts(stack: Stack) -> list[tuple[int, int, int]]:
    """Of each worker, as routers see it: waiting, running, and what was assigned since then."""
    store = ClusterStore(stack.redis_url, KEYS)
    try:
        seen: ClusterSnapshot = await store.snapshot()
    finally:
        await store.close()
    return [
        (view.load.waiting_tokens, view.load.running_requests, view.assigned_tokens)
        for view in seen.workers
        if view.load is not None
    ]


def assignments(stack: Stack) -> list[bytes]:
    with redis.Redis.from_url(stack.redis_url) as client:
        return [k for family in ("assigned", "leg") for k in client.scan_iter(f"*:{family}:*")]


def audit(stack: Stack) -> dict[str, Any]:
    program = [sys.executable, "-m", "kvrelay.services.cli", "audit", "--json"]
    command = [*program, "--redis", stack.redis_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    result: dict[str, Any] = json.loads(done.stdout)
    return result
