"""What is steered by its own tokens, and what is told of them, on virtual time: workers die, memory
is short, and the answer is the undisturbed one to the last logprob."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

from tests.sim.cluster import Shape, SimCluster
from tests.sim.model import VOCAB, Undisturbed
from tests.sim.virtual import run_virtual

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.transfer.faults import FaultRates, seeded_faults
from kvrelay.shared.transfer.loopback import LoopbackHub
from kvrelay.shared.types import LegSpec, SamplingParams, ValidRequest

SEEDS = int(os.environ.get("KVRELAY_TEST_SEEDS", "4"))
CLIENTS = 16


def random_sampling(rng: random.Random, few: list[int]) -> SamplingParams:
    """Over a handful of ids, which must come again and again."""
    words = [tuple(rng.choices(few, k=length)) for length in (2, 3)]
    return SamplingParams(
        temperature=rng.choice((0.0, 0.5, 1.0)),
        seed=rng.randrange(2**31),
        max_tokens=rng.randint(1, 20),
        presence_penalty=rng.choice((0.0, 0.7, -0.5)),
        frequency_penalty=rng.choice((0.0, 0.3)),
        repetition_penalty=rng.choice((1.0, 1.5)),
        logit_bias=tuple(sorted({token: rng.choice((-1.0, 2.0)) for token in few[:2]}.items())),
        allowed_token_ids=tuple(few),
        bad_words=tuple(words if rng.random() < 0.5 else words[:1]),
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, 0, 2)),
    )


def make_request(rng: random.Random, number: int, prefix: list[int]) -> ValidRequest:
    few = rng.sample(range(VOCAB), 6)
    own = rng.choices(few, k=rng.randint(1, 20))
    prompt = (prefix[: rng.randint(0, len(prefix))] + own)[:32]
    how = random_sampling(rng, few)
    specs = tuple(LegSpec(f"r{number}/{at}", tuple(prompt), how, choice=at) for at in range(2))
    return ValidRequest(f"r{number}", "sim", specs, len(prompt))


def check(spec: LegSpec, events: list[TokenEvent]) -> None:
    whole = Undisturbed.of(spec)
    assert [event.token for event in events] == whole.tokens
    assert [event.logprobs for event in events] == whole.logprobs
    assert list(events[0].prompt_logprobs) == whole.prompt_logprobs
    assert not any(event.prompt_logprobs for event in events[1:])
    asked = spec.sampling.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == (len(spec.prompt) - 1 if asked else 0)


async def life(seed: int, shape: Shape, kills: int) -> Counter[str]:
    rng = random.Random(seed)
    cluster = SimCluster(rng, LoopbackHub(seeded_faults(seed, FaultRates())), shape)
    await cluster.start()
    prefix = [rng.randrange(VOCAB) for _ in range(20)]

    async def client(number: int) -> None:
        await asyncio.sleep(rng.random())
        request = make_request(rng, number, prefix)
        for spec, events in zip(request.legs, await cluster.ask_events(request), strict=True):
            check(spec, events)

    async def killer() -> None:
        for _ in range(kills):
            await asyncio.sleep(rng.random() * 0.5)
            victims = [worker for worker in cluster.workers.values() if worker.alive]
            await cluster.kill_and_restart(rng.choice(victims), rng.random())

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        group.create_task(killer())
    await asyncio.sleep(2.0)
    states = [worker.engine.state for worker in cluster.workers.values()]
    assert not any(state.legs for state in states)
    attempts = {name: v for name, v in cluster.series().items() if "attempts_total" in name}
    await cluster.stop()
    await cluster.hub.close()
    again = int(sum(attempts.values())) - 2 * CLIENTS
    return Counter(preempted=sum(state.preemptions for state in states), again=again)


def lives(shape: Shape, kills: int) -> Counter[str]:
    return sum(
        (run_virtual(lambda at=at: life(at, shape, kills)) for at in range(SEEDS)), Counter()
    )


def test_answers_survive_the_death_of_workers() -> None:
    assert lives(Shape(), kills=4)["again"] > 0


def test_answers_survive_the_loss_of_their_memory() -> None:
    shape = Shape(prefills=0, decodes=0, boths=1, blocks=16)
    assert lives(shape, kills=0)["preempted"] > 0
