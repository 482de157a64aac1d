"""Placing legs: what the choice is told, and how routers agree on equals."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.sim.virtual import VirtualClock
from tests.unit.test_route import site

from kvrelay.services.router.choreography import LegMachine
from kvrelay.services.router.placement import Placement
from kvrelay.services.router.policy import Candidates
from kvrelay.services.router.route import Mode
from kvrelay.shared.errors import StoreError
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes, group_of
from kvrelay.shared.store.records import FINGERPRINT_FIELDS
from kvrelay.shared.types import LegSpec, SamplingParams

PROMPT = tuple(range(500))
GROUP = group_of(dict.fromkeys(FINGERPRINT_FIELDS, "x"))


class NothingHeld:
    """`Holdings` of a cluster that has computed nothing yet."""

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        return {}

    def forget(self, incarnation: str) -> None: ...


@dataclass
class Asked:
    """An assigner that takes the last, or none, and remembers what it was asked."""

    answers: bool = True
    calls: list[tuple[list[str], int, str]] = field(default_factory=list)

    async def assign(
        self, candidates: Sequence[str], cost_tokens: int, router: str, leg: str
    ) -> str:
        self.calls.append(([*candidates], cost_tokens, leg))
        if not self.answers:
            raise StoreError("away")
        return candidates[-1]


@dataclass
class Known:
    """Holdings of one chain."""

    hashes: Sequence[BlockHash]
    blocks: Mapping[str, int]

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        shared = 0
        while shared < len(self.hashes) and hashes[shared : shared + 1] == [self.hashes[shared]]:
            shared += 1
        return {name: min(count, shared) for name, count in self.blocks.items() if shared}

    def forget(self, incarnation: str) -> None: ...


def machine(leg: str = "r/0", salt: str = "") -> LegMachine:
    spec = LegSpec(leg, PROMPT, SamplingParams(max_tokens=4), cache_salt=salt)
    return LegMachine(spec, 0, lambda: 1)


def placement(assigner: Asked, mode: Mode = "auto") -> Placement:
    clock = VirtualClock(asyncio.get_running_loop())
    return Placement(assigner, NothingHeld(), clock, "router", mode)


def group(*names: str) -> Candidates:
    workers = {name: site(name).worker for name in names}
    prefills = tuple(worker for name, worker in workers.items() if name.startswith("p"))
    decodes = tuple(worker for name, worker in workers.items() if name.startswith("d"))
    return Candidates(prefills, decodes)


async def test_equals_are_agreed_on_in_the_order_of_what_they_got() -> None:
    assigner = Asked()
    places = placement(assigner, "split")
    route = await places.place(machine(), group("p1", "p2", "d1"))
    assert route.workers == ("p2", "d1")
    assert assigner.calls == [(["p1", "p2"], 500, "r/0#0:prefill")]
    places.over("r/0")
    await places.place(machine("r/1"), group("p1", "p2", "d1"))
    assert assigner.calls[-1][0] == ["p1", "p2"], "p2 got one, p1 none"


async def test_a_router_without_the_store_spreads_by_its_own_count() -> None:
    places = placement(Asked(answers=False), "split")
    chosen = []
    for number in range(4):
        route = await places.place(machine(f"r/{number}"), group("p1", "p2", "d1", "d2"))
        places.over(f"r/{number}")
        chosen.append(route.workers)
    assert chosen == [("p1", "d1"), ("p2", "d2"), ("p1", "d1"), ("p2", "d2")]


async def test_nobody_is_asked_where_one_worker_is_best() -> None:
    assigner = Asked()
    places = placement(assigner)
    await places.place(machine(), group("p1", "d1"))
    assert assigner.calls == []


async def test_a_prompt_goes_where_its_prefix_is_known_under_its_salt() -> None:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, PROMPT, 16, chain_root(GROUP, "tenant"))
    places = placement(Asked(), "split")
    places.holdings = Known(hashes, {"p2": 20, "d2": 40})
    salted = await places.place(machine(salt="tenant"), group("p1", "p2", "d1", "d2"))
    assert (salted.first.name, salted.first.held_tokens) == ("p2", 320)
    other = await places.place(machine("r/1"), group("p1", "p2", "d1", "d2"))
    assert other.first.held_tokens == 0


async def test_what_was_placed_waits_where_it_was_until_its_first_token() -> None:
    places = placement(Asked(), "auto")
    workers = group("p1", "d1")
    assert (await places.place(machine(), workers)).workers == ("d1",)
    assert (await places.place(machine("r/1"), workers)).workers == ("p1", "d1")
    places.computed("r/0")
    places.over("r/0")
    places.over("r/1")
    assert (await places.place(machine("r/2"), workers)).workers == ("d1",)


async def test_a_next_turn_finds_what_the_directory_does_not_know_yet() -> None:
    places = placement(Asked(), "split")
    workers = group("p1", "p2", "d1", "d2")
    asked = machine()
    first = await places.place(asked, workers)
    places.computed("r/0")
    asked.tokens += range(100)
    places.finished(asked)
    spec = LegSpec("r/1", (*PROMPT, *range(100), 7), SamplingParams(max_tokens=4))
    second = await places.place(LegMachine(spec, 0, lambda: 1), workers)
    assert second.workers == first.workers
    assert second.decode is not None
    assert (second.first.held_tokens, second.decode.held_tokens) == (31 * 16, 37 * 16)


async def test_decode_has_nothing_of_an_answer_that_ended_at_its_first_token() -> None:
    places = placement(Asked(), "split")
    workers = group("p1", "d1")
    asked = machine()
    await places.place(asked, workers)
    places.computed("r/0")
    asked.tokens.append(7)
    places.finished(asked)
    again = await places.place(machine("r/1"), workers)
    assert again.decode is not None
    assert (again.first.held_tokens, again.decode.held_tokens) == (31 * 16, 0)
