"""Chaos plans on virtual time: the same objects that `kvrelay chaos` runs on real processes.

Rules act where they do in life: on chunks, commands and events. Of the process actions a worker's
`kill` is what the simulation has.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.sim.cluster import Shape, SimCluster, SimWorker
from tests.sim.model import reference
from tests.sim.test_cluster import SEEDS, make_request
from tests.sim.virtual import run_virtual

from kvrelay.services.router.dispatch import worker_end
from kvrelay.services.router.policy import LiveWorker
from kvrelay.shared.chaos.decide import Chaos, fraction
from kvrelay.shared.chaos.plan import (
    Action,
    ChaosPlan,
    Fault,
    ProcessAction,
    Step,
    load_plan,
    parse_plan,
)
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.lifecycle import QUIET_MS
from kvrelay.shared.rpc.convert import leg_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.transfer.faults import planned_faults
from kvrelay.shared.transfer.loopback import LoopbackHub
from kvrelay.shared.types import LegSpec, Role, SamplingParams

PLANS = Path(__file__).parents[2] / "loadtests" / "chaos"
LATE = """
rules:
  - {step: need_room, fault: reorder, rate: 0.1, delay_s: 0.02}
  - {step: room_given, fault: delay, rate: 0.3, delay_s: 0.1}
  - {step: started, fault: reorder, rate: 0.2, delay_s: 0.05}
  - {step: token, fault: reorder, rate: 0.1, delay_s: 0.05}
  - {step: token, fault: duplicate, rate: 0.1}
  - {step: published_out, fault: delay, rate: 0.3, delay_s: 0.2}
  - {step: ended, fault: duplicate, rate: 0.3}
  - {step: cancel, fault: delay, rate: 0.5, delay_s: 0.3}
  - {step: cancel, fault: duplicate, rate: 0.5}
  - {step: room, fault: delay, rate: 0.3, delay_s: 0.1}
  - {step: published, fault: duplicate, rate: 0.3}
processes:
  - {action: kill, part: worker, every_s: 3, limit: 2}
"""
LOST = """
rules:
  - {step: %s, fault: drop, rate: 0.1}
"""
UNFREED = """
rules:
  - {step: published, fault: drop, rate: 0.7}
  - {step: cancel, fault: drop, rate: 0.5}
"""
DROPPABLE = ("serve", "reserve", "room", "need_room", "room_given", "started", "token")
"""Of these the router's own deadline ends the wait."""


def rougher(plan: ChaosPlan, times: float) -> ChaosPlan:
    """With each fault so much more often: a life here has few chunks."""
    rules = [rule.model_copy(update={"rate": (rule.rate or 0) * times}) for rule in plan.rules]
    return plan.model_copy(update={"rules": tuple(rules)})


async def life(seed: int, plan: ChaosPlan, rest_s: float = 5.0) -> list[str]:
    """40 requests: each has its right answer or one clean error; gives the errors.

    Nothing is held `rest_s` after the last."""
    rng = random.Random(seed)
    plan = plan.model_copy(update={"seed": seed})
    injected: Counter[str] = Counter()

    def count(step: Step, fault: Fault) -> None:
        injected[f"{step} {fault}"] += 1

    hub = LoopbackHub(planned_faults(Chaos(plan, "hub", Role.PREFILL, count)))
    cluster = SimCluster(rng, hub, Shape(), plan, count)
    await cluster.start()
    whole = 0
    failures: list[str] = []

    async def client(number: int) -> None:
        nonlocal whole
        await asyncio.sleep(rng.random() * 5)
        request = make_request(rng, number, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        try:
            answers = await cluster.ask(request, None)
        except KvrelayError as error:
            failures.append(str(error))
            return
        for spec, answer in zip(request.legs, answers, strict=True):
            sampling = spec.sampling
            expected = reference(spec.prompt, sampling.max_tokens, sampling.seed, spec.choice)
            assert answer == expected, f"seed {seed}, {spec.leg}: a wrong token"
        whole += 1

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(client(number))
        for number, action in enumerate(plan.processes):
            group.create_task(perform(cluster, number, action))
    ended_s = asyncio.get_running_loop().time()
    assert whole + len(failures) == 40
    await asyncio.sleep(rest_s)
    assert cluster.observer.in_flight == 0
    await leave(cluster)
    assert injected, "the plan was followed"
    assert ended_s < 300, "virtual time: no wait is longer than its deadlines"
    return failures


async def leave(cluster: SimCluster) -> None:
    """Nothing is held at rest."""
    for worker in cluster.workers.values():
        counts = worker.engine.state.pool.counts()
        assert (counts.in_use, counts.quarantined) == (0, 0), f"{worker.name} leaks"
    await cluster.stop()
    await cluster.hub.close()


async def perform(cluster: SimCluster, number: int, action: ProcessAction) -> None:
    """The kills of a plan, each of a worker that is whole and not the last of its role."""
    assert action.action == (Action.KILL,) and action.every_s and action.limit
    for count in range(action.limit):
        await asyncio.sleep(action.every_s)
        victims = [w for w in cluster.workers.values() if w.open and spared(cluster, w)]
        at = int(fraction(cluster.plan and cluster.plan.seed, number, count) * len(victims))
        await cluster.kill_and_restart(victims[at], 0.5)


def spared(cluster: SimCluster, worker: SimWorker) -> bool:
    return sum(w.open and w.role is worker.role for w in cluster.workers.values()) > 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_faults_of_chunks_cost_time_and_never_a_token(seed: int) -> None:
    failures = run_virtual(lambda: life(seed, rougher(load_plan(PLANS / "transfer.yaml"), 5)))
    assert len(failures) <= 4
    assert all(failure.startswith("given up after 4 attempts: ") for failure in failures)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_late_twice_or_overtaken_costs_no_answer(seed: int) -> None:
    assert run_virtual(lambda: life(seed, parse_plan(LATE, "late"))) == []


@pytest.mark.parametrize("step", DROPPABLE)
@pytest.mark.parametrize("seed", range(max(1, SEEDS // 4)))
def test_what_is_lost_ends_its_request_by_a_deadline(seed: int, step: str) -> None:
    run_virtual(lambda: life(seed, parse_plan(LOST % step, step)))


@pytest.mark.parametrize("seed", range(max(2, SEEDS // 4)))
def test_what_nobody_lets_go_of_is_let_go_by_the_workers_own_deadline(seed: int) -> None:
    """The words that all is published, and half of the cancels that follow."""
    rest_s = max(QUIET_MS.values()) / 1000 * 1.2
    plan = parse_plan(UNFREED, "unfreed")
    failures = run_virtual(lambda: life(seed, plan, rest_s))
    assert all("queued took" in failure for failure in failures), "who waits for what is not freed"
    assert len(failures) <= 4


def test_who_asks_room_for_what_nobody_wants_is_told_to_let_go() -> None:
    """Its cancel was lost, or came before what it was about."""

    async def run() -> None:
        cluster = SimCluster(random.Random(1), LoopbackHub(), Shape())
        await cluster.start()
        prefill, decode = (
            next(w for w in cluster.workers.values() if w.role is role)
            for role in (Role.PREFILL, Role.DECODE)
        )
        serve = pb.Serve(
            ref=pb.Ref(leg="stray/0", attempt=0, nonce=1),
            leg=leg_to_wire(LegSpec("stray/0", (1, 2, 3), SamplingParams(max_tokens=2))),
            decode=worker_end(LiveWorker(decode.record, decode.load())).peer,
        )
        send, told = prefill.send, list[str | None]()

        def note(command: pb.Command) -> None:
            told.append(command.WhichOneof("kind"))
            send(command)

        prefill.send = note  # type: ignore[method-assign]
        prefill.send(pb.Command(serve=serve))
        await asyncio.sleep(0.9)
        assert prefill.engine.state.legs == {}
        assert told == ["serve", "cancel"]
        await leave(cluster)

    run_virtual(run)


def test_the_same_seed_gives_the_same_life() -> None:
    plan = rougher(load_plan(PLANS / "transfer.yaml"), 5)
    lives = [run_virtual(lambda: life(2, plan)) for _ in range(2)]
    assert len(lives[0]) == len(lives[1])
