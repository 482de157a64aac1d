"""Workers for a leg: the pure choice over what is known now, agreed on with the other routers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.services.router.backlog import Backlog
from kvrelay.services.router.choreography import LegMachine
from kvrelay.services.router.holdings import Holdings
from kvrelay.services.router.overhead import Overheads
from kvrelay.services.router.policy import Candidates, LiveWorker
from kvrelay.services.router.recent import RecentBlocks
from kvrelay.services.router.route import (
    Mode,
    Route,
    SetupOf,
    Site,
    Sites,
    best,
    near,
    no_setup,
    routes,
)
from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import StoreError
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes, group_of

log = logging.getLogger(__name__)


class Assigner(Protocol):
    """The fair choice among candidates over all routers (`ClusterStore`)."""

    async def assign(
        self, candidates: Sequence[str], cost_tokens: int, router: str, leg: str
    ) -> str:
        """Of equals the earlier. Raises `StoreError` when there is none to be had: then each
        router chooses by itself."""
        ...


@dataclass(slots=True)
class Chain:
    """The names of a placed leg's prefix blocks, and who is to have them."""

    root: BlockHash
    block_size: int
    hashes: list[BlockHash]
    route: Route | None = None
    placed_ns: int = 0
    answered: int = 0
    """Tokens that the answer had then."""

    def extend(self, known: Sequence[int]) -> None:
        """The last token is always computed anew: no block with it is looked for."""
        extend_hashes(self.hashes, known[:-1], self.block_size, self.root)


@dataclass(slots=True)
class Placement:
    """One per router, on its event loop."""

    assigner: Assigner
    holdings: Holdings
    clock: Clock
    router: str
    mode: Mode = "auto"
    backlog: Backlog = field(default_factory=Backlog)
    overheads: Overheads = field(default_factory=Overheads)
    recent: RecentBlocks = field(default_factory=RecentBlocks)
    setup_s: SetupOf = no_setup
    chains: dict[str, Chain] = field(default_factory=dict)
    """Of the legs that were placed and are not over."""

    async def place(self, machine: LegMachine, found: Candidates) -> Route:
        """A route for the next attempt, counted at its workers until `over` or `ended`."""
        known = [*machine.spec.prompt, *machine.tokens]
        workers = (*found.prefills, *found.decodes, *found.alone)
        record = workers[0].record  # all workers are of one group, so one chain names their blocks
        root = chain_root(group_of(record.fingerprint), machine.spec.cache_salt)
        chain = Chain(root, record.block_size, [])
        chain.extend(known)
        held = self.holdings.held_blocks(chain.hashes)
        names = [worker.incarnation for worker in workers]
        held = self.recent.added_to(held, names, chain.hashes, self.clock.now_ns())
        sites = self._sites(held, found)
        options = near(routes(len(known), sites, self.mode))
        key = f"{machine.spec.leg}#{machine.attempt + 1}"
        for side in (_first, _last):
            options = await self._agree(options, side, key, len(known))
        route = best(options)
        self._count(machine.spec.leg, route, route.first.lacking(len(known)))
        chain.route, chain.placed_ns = route, self.clock.now_ns()
        chain.answered = len(machine.tokens)
        self.chains[machine.spec.leg] = chain
        return route

    def follow(self, machine: LegMachine, route: Route) -> Route:
        """Another choice of a prompt goes where the first went: it is computed once for all."""
        self._count(machine.spec.leg, route, 1)
        return route

    def computed(self, leg: str) -> None:
        """Its first token has come."""
        now_ns = self.clock.now_ns()
        self.backlog.computed(leg, now_ns)
        chain = self.chains.get(leg)
        if chain is None or (route := chain.route) is None:
            return
        self.recent.note(route.first.name, chain.hashes, now_ns)
        if route.measured:
            took_s = (now_ns - chain.placed_ns) / 1e9
            on_top_s = took_s - route.terms.wait_s - route.terms.compute_s
            self.overheads.observe(route.kind, on_top_s, now_ns)

    def finished(self, machine: LegMachine) -> None:
        """No more tokens of it come; its last worker keeps prompt and answer."""
        chain = self.chains.get(machine.spec.leg)
        route = chain.route if chain is not None else None
        # Of a split answer decode has nothing before it has said a token of its own.
        if chain and route and len(machine.tokens) - chain.answered >= len(route.workers):
            chain.extend([*machine.spec.prompt, *machine.tokens])
            self.recent.note(route.workers[-1], chain.hashes, self.clock.now_ns())
        self.over(machine.spec.leg)

    def ended(self, worker: str, leg: str) -> None:
        self.backlog.ended(worker, leg, self.clock.now_ns())

    def over(self, leg: str) -> None:
        """This attempt at it, or all of it."""
        self.chains.pop(leg, None)
        self.backlog.leg_over(leg, self.clock.now_ns())

    def lost(self, worker: str) -> None:
        self.backlog.lost(worker)
        self.holdings.forget(worker)

    def _count(self, leg: str, route: Route, tokens: int) -> None:
        now_ns = self.clock.now_ns()
        self.backlog.give(route.first.name, leg, tokens, now_ns)
        if route.decode is not None:
            self.backlog.give(route.decode.name, leg, 0, now_ns)

    def _sites(self, held: Mapping[str, int], found: Candidates) -> Sites:
        now_ns = self.clock.now_ns()

        def seen(workers: Sequence[LiveWorker]) -> tuple[Site, ...]:
            backlog = self.backlog
            return tuple(
                Site(
                    worker,
                    held.get(worker.incarnation, 0) * worker.record.block_size,
                    backlog.waiting(worker, now_ns),
                    backlog.share(worker),
                )
                for worker in workers
            )

        overhead_s = self.overheads.now(now_ns)
        roles = seen(found.prefills), seen(found.decodes), seen(found.alone)
        return Sites(*roles, overhead_s, self.setup_s)

    async def _agree(
        self, options: list[Route], side: Callable[[Route], Site], key: str, prompt_tokens: int
    ) -> list[Route]:
        """Those of the options with the worker that all routers together leave most idle."""
        by_name: dict[str, list[Route]] = {}
        for route in sorted(options, key=lambda route: side(route).share):
            by_name.setdefault(side(route).name, []).append(route)
        if len(by_name) == 1:
            return options
        site = side(options[0])
        key = f"{key}:{site.worker.record.role}"
        cost = site.lacking(prompt_tokens)
        try:
            return by_name[await self.assigner.assign([*by_name], cost, self.router, key)]
        except StoreError:
            log.debug("placed by the router's own view")
            return options


def _first(route: Route) -> Site:
    return route.first


def _last(route: Route) -> Site:
    return route.decode or route.first
