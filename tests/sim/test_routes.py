"""The choice of a route on virtual time: both ways are taken, and each pays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.sim.cluster import TOKEN_S, Shape, SimCluster
from tests.sim.model import VOCAB, reference
from tests.sim.virtual import run_virtual

from kvrelay.services.router.route import Mode
from kvrelay.shared.telemetry.labels import RouteKind
from kvrelay.shared.transfer.faults import FaultRates, seeded_faults
from kvrelay.shared.transfer.loopback import LoopbackHub
from kvrelay.shared.types import LegSpec, SamplingParams, ValidRequest

BLOCKS = 400
MODES: tuple[Mode, ...] = ("auto", "split", "local")
RATIO = "kvrelay_first_token_outcome_ratio"
Times = tuple[float, RouteKind]
Case = Callable[["Clients"], Coroutine[Any, Any, Times]]


def tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


class Clients:
    """Of one simulated prefill and one decode worker, whose rates are known."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self._asked = 0

    async def ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], Times]:
        """The answer; how long its first token took, and by which route it came."""
        self._asked += 1
        leg = LegSpec(f"r{self._asked}/0", tuple(prompt), SamplingParams(max_tokens=max_tokens))
        request = ValidRequest(f"r{self._asked}", "sim", (leg,), len(prompt))
        loop = asyncio.get_running_loop()
        begun_s, first_s, answer = loop.time(), 0.0, []
        generation = self.cluster.dispatcher.generate(request)
        async for event in generation:
            first_s = first_s or loop.time() - begun_s
            answer.append(event.token)
        assert answer == reference(prompt, max_tokens)
        route = generation.watch.first_route
        assert route is not None
        return answer, (first_s, route.kind)


async def next_turn(clients: Clients) -> Times:
    """An answer of 60 tokens lies at decode; the next turn adds 20."""
    prompt = tokens("turn", 120)
    answer, _ = await clients.ask(prompt, 60)
    await asyncio.sleep(0.1)
    _, times = await clients.ask([*prompt, *answer, *tokens("next", 20)], 4)
    return times


async def second_prompt(clients: Clients) -> Times:
    """A prompt that nobody knows comes while another is being computed."""
    first = asyncio.create_task(clients.ask(tokens("first", 300), 4))
    await asyncio.sleep(0.005)
    _, times = await clients.ask(tokens("second", 200), 4)
    await first
    return times


async def one_after_another(clients: Clients) -> Times:
    """Ten unknown prompts, each alone."""
    for number in range(10):
        await asyncio.sleep(0.1)
        _, times = await clients.ask(tokens(f"alone {number}", 50 + 10 * number), 2)
    return times


def played(case: Case, mode: Mode, series: dict[str, float]) -> Times:
    """`series`: takes the router's metrics."""

    async def play() -> Times:
        hub = LoopbackHub(seeded_faults(1, FaultRates()))
        shape = Shape(prefills=1, decodes=1, blocks=BLOCKS, route=mode)
        cluster = SimCluster(random.Random(1), hub, shape)
        await cluster.start()
        for worker in cluster.workers.values():
            worker.tokens_per_s = 1 / TOKEN_S
        times = await case(Clients(cluster))
        series.update(cluster.series())
        await asyncio.sleep(1.0)
        await cluster.stop()
        await hub.close()
        return times

    return run_virtual(play)


@pytest.mark.parametrize(
    ("case", "kind"), [(next_turn, RouteKind.LOCAL), (second_prompt, RouteKind.SPLIT)]
)
def test_the_choice_is_the_better_of_the_two(case: Case, kind: RouteKind) -> None:
    (chosen_s, chosen), (split_s, split), (local_s, local) = (
        played(case, mode, {}) for mode in MODES
    )
    assert (split, local, chosen) == (RouteKind.SPLIT, RouteKind.LOCAL, kind)
    assert chosen_s <= min(split_s, local_s) * 1.05
    assert chosen_s <= max(split_s, local_s) * 0.95, "else it makes no difference"


@pytest.mark.parametrize("kind", RouteKind)
def test_first_tokens_come_when_they_were_predicted(kind: RouteKind) -> None:
    """After the first ones, which taught what comes on top of computing."""
    series: dict[str, float] = {}
    played(one_after_another, kind.value, series)
    label = f'route="{kind}"'
    assert series[f"kvrelay_routes_total{{{label}}}"] == 10
    assert series[f"{RATIO}_count{{{label}}}"] == 10
    below, above = (series[f'{RATIO}_bucket{{le="{le}",{label}}}'] for le in ("0.8", "1.25"))
    assert above - below >= 8
