"""The promise, on virtual time: the same tokens whatever happens, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from tests.sim.cluster import Shape, SimCluster
from tests.sim.model import VOCAB, reference
from tests.sim.virtual import run_virtual

from kvrelay.services.router import choreography
from kvrelay.services.router.available import NOBODY_S
from kvrelay.shared.errors import Unavailable, WorkerFailed
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.transfer.faults import FaultRates, seeded_faults
from kvrelay.shared.transfer.loopback import LoopbackHub
from kvrelay.shared.types import LegSpec, Role, SamplingParams, ValidRequest
from kvrelay.shared.worker.leftovers import LINGER_S

SEEDS = int(os.environ.get("KVRELAY_TEST_SEEDS", "4"))
"""Lives of each kind; `make fuzz` asks for many."""
CALM = FaultRates()
ROUGH = FaultRates(
    drop=0.003, delay=0.1, duplicate=0.003, reorder=0.005, truncate=0.003, flip=0.005
)


def make_request(rng: random.Random, number: int, prefix: list[int]) -> ValidRequest:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    if rng.random() < 0.4:
        prompt = (prefix[: rng.randint(1, len(prefix))] + prompt)[:40]
    legs = rng.choice((1, 1, 1, 2))
    seed = rng.randrange(2**31)
    params = SamplingParams(max_tokens=rng.randint(1, 20), seed=seed)
    specs = tuple(LegSpec(f"r{number}/{i}", tuple(prompt), params, choice=i) for i in range(legs))
    return ValidRequest(f"r{number}", "sim", specs, len(prompt))


async def life(
    seed: int, shape: Shape, faults: FaultRates, kills: int = 0, drains: int = 0
) -> dict[str, int]:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    cluster = SimCluster(rng, LoopbackHub(seeded_faults(seed, faults)), shape)
    await cluster.start()
    prefix = [rng.randrange(VOCAB) for _ in range(20)]
    outcome = {"whole": 0, "left": 0}

    async def client(number: int) -> None:
        await asyncio.sleep(rng.random() * 2)
        request = make_request(rng, number, prefix)
        patience_s = rng.random() * 0.5 if rng.random() < 0.3 else None
        answers = await cluster.ask(request, patience_s)
        for spec, answer in zip(request.legs, answers, strict=True):
            sampling = spec.sampling
            whole = [
                reference(spec.prompt, sampling.max_tokens, sampling.seed, spec.choice, weights)
                for weights in range(shape.groups)
            ]
            possible = [w for w in whole if answer == w[: len(answer)]]
            assert possible, f"seed {seed}, {spec.leg}: a wrong token"
            if patience_s is None:
                assert answer in possible, f"seed {seed}, {spec.leg}: cut short"
        outcome["left" if patience_s is not None else "whole"] += 1

    async def killer() -> None:
        for _ in range(kills):
            await asyncio.sleep(rng.random() * 2)
            victims = [worker for worker in cluster.workers.values() if worker.alive]
            await cluster.kill_and_restart(rng.choice(victims), rng.random())

    async def drainer() -> None:
        for _ in range(drains):
            await asyncio.sleep(rng.random() * 2)
            victims = [worker for worker in cluster.workers.values() if worker.alive]
            await cluster.drain_and_restart(rng.choice(victims), rng.random(), rng.random())

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(client(number))
        group.create_task(killer())
        group.create_task(drainer())
    ended_s = loop.time()
    await asyncio.sleep(2.0)
    assert cluster.observer.in_flight == 0
    for worker in cluster.workers.values():
        counts = worker.engine.state.pool.counts()
        assert (counts.in_use, counts.quarantined) == (0, 0), f"seed {seed}: {worker.name} leaks"
        assert worker.engine.state.legs == {}
    await asyncio.sleep(2 * LINGER_S)
    kept = {worker.name: worker.transport.kept_bytes for worker in cluster.workers.values()}
    assert not any(kept.values()), f"seed {seed}: {kept} bytes are kept for nobody"
    assert len(cluster.dispatcher._leaving) == 0
    await cluster.stop()
    await cluster.hub.close()
    assert ended_s < 600, "virtual time: nobody waited for a last resort"
    return outcome


@pytest.mark.parametrize("seed", range(SEEDS))
def test_split_answers_are_the_undisturbed_ones(seed: int) -> None:
    outcome = run_virtual(lambda: life(seed, Shape(), CALM, kills=0))
    assert sum(outcome.values()) == 40


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_survive_the_death_of_workers(seed: int) -> None:
    run_virtual(lambda: life(seed, Shape(), CALM, kills=2))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_survive_workers_that_drain(seed: int) -> None:
    run_virtual(lambda: life(seed, Shape(), CALM, kills=1, drains=3))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_answer_is_of_one_set_of_weights(seed: int) -> None:
    """Whoever dies, the group that began it ends it."""
    run_virtual(lambda: life(seed, Shape(groups=2), ROUGH, kills=4, drains=2))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rough_network_costs_time_and_never_a_token(seed: int) -> None:
    run_virtual(lambda: life(seed, Shape(), ROUGH, kills=0))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_small_pools_preempt_and_still_answer(seed: int) -> None:
    run_virtual(lambda: life(seed, Shape(prefills=1, decodes=1, blocks=16), CALM, kills=0))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_unsplit_answers_are_the_same(seed: int) -> None:
    shape = Shape(prefills=0, decodes=0, boths=2)
    run_virtual(lambda: life(seed, shape, CALM, kills=1))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_are_the_same_wherever_prompts_are_computed(seed: int) -> None:
    shape = Shape(route="local" if seed % 3 == 2 else "auto")
    run_virtual(lambda: life(seed, shape, CALM, kills=2))


def test_a_request_waits_a_little_for_workers_that_are_just_gone() -> None:
    """And is refused when they stay away, as is at once who comes after that."""

    async def scene() -> None:
        rng = random.Random(4)
        loop = asyncio.get_running_loop()
        cluster = SimCluster(rng, LoopbackHub(seeded_faults(1, CALM)), Shape(decodes=1))
        await cluster.start()
        (decode,) = (w for w in cluster.workers.values() if w.role is Role.DECODE)
        back = asyncio.create_task(cluster.kill_and_restart(decode, NOBODY_S - 2.0))
        await asyncio.sleep(1.5)  # it is missed by now
        assert cluster.dispatcher.readiness().missing
        request = make_request(rng, 1, [1])
        assert all(await answered(cluster, request)), "it came back in time"
        await back
        (decode,) = (w for w in cluster.workers.values() if w.role is Role.DECODE)
        gone = asyncio.create_task(cluster.kill_and_restart(decode, 3600.0))
        await asyncio.sleep(1.5)
        begun_s = loop.time()
        with pytest.raises(Unavailable, match="no decode worker is alive"):
            await answered(cluster, make_request(rng, 2, [1]))
        assert loop.time() - begun_s == pytest.approx(NOBODY_S - 0.5, abs=0.1)
        with pytest.raises(Unavailable):
            cluster.dispatcher.generate(make_request(rng, 3, [1]))
        assert cluster.observer.in_flight == 0
        await gone
        await cluster.stop()
        await cluster.hub.close()

    async def answered(cluster: SimCluster, request: ValidRequest) -> list[int]:
        generation = cluster.dispatcher.generate(request)
        return [event.token async for event in generation]

    run_virtual(scene)


def test_the_same_seed_gives_the_same_life() -> None:
    lives = [run_virtual(lambda: life(7, Shape(), ROUGH, kills=2)) for _ in range(2)]
    assert lives[0] == lives[1]


def test_a_defect_before_an_attempt_ends_its_request_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not at a deadline a minute later; the next one is served."""

    def defect(spec: LegSpec) -> pb.Leg:
        raise ValueError("out of range")

    async def scene() -> None:
        rng = random.Random(1)
        cluster = SimCluster(rng, LoopbackHub(seeded_faults(1, CALM)), Shape())
        await cluster.start()
        request = make_request(rng, 0, [1])
        assert len(request.legs) == 2
        with monkeypatch.context() as broken:
            broken.setattr(choreography, "leg_to_wire", defect)
            with pytest.raises(WorkerFailed, match="could not be started: ValueError"):
                await cluster.ask(request, None)
        assert asyncio.get_running_loop().time() < 1
        assert cluster.observer.in_flight == 0
        assert all(await cluster.ask(make_request(rng, 1, [1]), None))
        await cluster.stop()
        await cluster.hub.close()

    run_virtual(scene)
    assert "could not be started" in caplog.text
