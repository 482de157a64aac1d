"""Workers for a leg: the pure choice over what is known now, agreed on with the other routers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.services.router.backlog import Backlog
from kvrelay.services.router.choreography import LegMachine
from kvrelay.services.router.holdings import Holdings
from kvrelay.services.router.policy import Candidates, LiveWorker
from kvrelay.services.router.route import Mode, Route, Site, Sites, best, near, routes
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
class Placement:
    """One per router, on its event loop."""

    assigner: Assigner
    holdings: Holdings
    clock: Clock
    router: str
    mode: Mode = "auto"
    backlog: Backlog = field(default_factory=Backlog)

    async def place(self, machine: LegMachine, found: Candidates) -> Route:
        """A route for the next attempt, counted at its workers until `over` or `ended`."""
        known = [*machine.spec.prompt, *machine.tokens]
        sites = self._sites(known, machine.spec.cache_salt, found)
        options = near(routes(len(known), sites, self.mode))
        key = f"{machine.spec.leg}#{machine.attempt + 1}"
        for side in (_first, _last):
            options = await self._agree(options, side, key, len(known))
        route = best(options)
        self._count(machine.spec.leg, route, route.first.lacking(len(known)))
        return route

    def follow(self, machine: LegMachine, route: Route) -> Route:
        """Another choice of a prompt goes where the first went: it is computed once for all."""
        self._count(machine.spec.leg, route, 1)
        return route

    def computed(self, leg: str) -> None:
        """Its first token has come."""
        self.backlog.computed(leg, self.clock.now_ns())

    def ended(self, worker: str, leg: str) -> None:
        self.backlog.ended(worker, leg, self.clock.now_ns())

    def over(self, leg: str) -> None:
        self.backlog.leg_over(leg, self.clock.now_ns())

    def lost(self, worker: str) -> None:
        self.backlog.lost(worker)
        self.holdings.forget(worker)

    def _count(self, leg: str, route: Route, tokens: int) -> None:
        now_ns = self.clock.now_ns()
        self.backlog.give(route.first.name, leg, tokens, now_ns)
        if route.decode is not None:
            self.backlog.give(route.decode.name, leg, 0, now_ns)

    def _sites(self, known: Sequence[int], salt: str, found: Candidates) -> Sites:
        held = self._held(known, salt, (*found.prefills, *found.decodes, *found.alone))
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

        return Sites(seen(found.prefills), seen(found.decodes), seen(found.alone))

    def _held(
        self, known: Sequence[int], salt: str, workers: Sequence[LiveWorker]
    ) -> Mapping[str, int]:
        """Blocks of the prompt by worker; all workers are of one group, so one chain names them."""
        record = workers[0].record
        hashes: list[BlockHash] = []
        root = chain_root(group_of(record.fingerprint), salt)
        extend_hashes(hashes, known[:-1], record.block_size, root)  # the last one is computed
        return self.holdings.held_blocks(hashes)

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
