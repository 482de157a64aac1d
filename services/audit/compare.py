"""Whose is what: findings of one picture, and those of them that stay. Pure.

A cluster moves while it is looked at, so one picture proves little: a leg that a router has just
sent is not at its worker yet. What is wrong is still so, in the same words, in the next pictures.
Where counts are compared the words hold the legs that they were counted over: they only stay while
nothing came or went.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvrelay.services.audit.facts import HeldLeg, Picture, RouterFacts, WorkerAnswer, WorkerFacts
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.store.survey import LedgerRow, Stray
from kvrelay.shared.types import LegRef


class Kind(StrEnum):
    BLOCKS = "blocks"
    """Of a leg that no router knows."""
    RESERVATION = "reservation"
    """For such a leg."""
    LEG = "leg"
    """On one side only, holding no blocks."""
    POOL = "pool"
    """A worker does not agree with itself."""
    RELAY = "relay"
    """The transport holds something for nobody."""
    LEDGER = "ledger"
    """A record that is open and has no owner."""
    DIRECTORY = "directory"
    """What is told of a pool and what is in it."""
    QUEUE = "queue"
    """A counter in Redis that is not the worker's own."""
    GAUGE = "gauge"
    """A counter of a router that is not what it has."""
    LEASE = "lease"
    """Something in Redis without a process."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    where: str
    what: str
    digests: frozenset[BlockHash] = frozenset()
    """Of the blocks that it is about, where it is about some of many."""
    meanwhile: frozenset[object] = frozenset()
    """What was there when it was counted."""

    @property
    def text(self) -> str:
        return self.what.format(count=len(self.digests)) if self.digests else self.what


def staying(before: Iterable[Finding], now: Iterable[Finding]) -> list[Finding]:
    """Those that are in both; of blocks those that are in both."""
    known = {_same(finding): finding for finding in before}
    found: list[Finding] = []
    for finding in now:
        earlier = known.get(_same(finding))
        if earlier is None:
            continue
        digests = finding.digests & earlier.digests
        if digests or not finding.digests:
            found.append(replace(finding, digests=digests))
    return found


def _same(finding: Finding) -> tuple[object, ...]:
    return finding.kind, finding.where, finding.what, finding.meanwhile


def compare(picture: Picture) -> list[Finding]:
    """What has no live owner, or is counted wrongly, in this picture."""
    owners = Owners(picture.routers)
    found: list[Finding] = []
    for worker in picture.workers:
        found += _worker(worker, owners)
    for router in picture.routers:
        found += _router(router, picture)
    found += (finding for row in picture.ledger if (finding := _ledger(row, owners)))
    found += (_stray(stray) for stray in picture.strays)
    found += (Finding(Kind.LEASE, "Redis", f"a record of {line}") for line in picture.rejected)
    return found


class Owners:
    """Who knows a leg."""

    def __init__(self, routers: Iterable[RouterFacts]) -> None:
        self._routers = {name: router for router in routers for name in router.names}
        legs = (r.answer.legs for r in routers if r.answer is not None)
        self._refs = {leg.ref: leg.told for each in legs for leg in each}
        self._legs = {ref.leg for ref in self._refs}

    def problem(self, router: str, ref: LegRef, worker: str) -> str | None:
        """Why a leg at a worker has no owner; None when it has, or nobody can tell."""
        owner = self._routers.get(router)
        if owner is None or owner.absent:
            return f"its router {router[:12]} is gone"
        if owner.answer is None:
            return None
        told = self._refs.get(ref)
        if told is None or worker not in told:
            return f"its router {router[:12]} does not know it"
        return None

    def problem_of(self, row: LedgerRow) -> str | None:
        owner = self._routers.get(row.router)
        if owner is None or owner.absent:
            return f"its router {row.router[:12]} is gone"
        if owner.answer is not None and row.leg not in self._legs:
            return f"its router {row.router[:12]} does not know it"
        return None

    def busy(self, worker: str) -> bool:
        return any(worker in told for told in self._refs.values())


def _worker(worker: WorkerFacts, owners: Owners) -> Iterator[Finding]:
    name, answer = worker.name, worker.answer
    if worker.absent:
        yield Finding(Kind.LEASE, name, f"a lease without a process: {worker.absent}")
    if answer is None:
        return
    if answer.problem:
        yield Finding(Kind.POOL, name, answer.problem)
    for leg in answer.legs:
        problem = owners.problem(leg.router, leg.ref, worker.incarnation)
        if problem is not None:
            yield Finding(_kind_of(leg), name, f"{_held(leg)}: {problem}")
    yield from _relay(name, answer, owners.busy(worker.incarnation))
    yield from _directory(name, worker.directory, answer.digests)
    yield from _load(worker, answer, owners)


def _kind_of(leg: HeldLeg) -> Kind:
    if leg.phase in (Phase.RESERVING, Phase.RECEIVING):
        return Kind.RESERVATION
    return Kind.BLOCKS if leg.blocks else Kind.LEG


def _held(leg: HeldLeg) -> str:
    return f"{_leg(leg.ref)} is {leg.phase}, holding {leg.blocks} blocks"


def _leg(ref: LegRef) -> str:
    return f"leg {ref.leg}, attempt {ref.attempt} ({ref.nonce:x})"


def _relay(name: str, answer: WorkerAnswer, busy: bool) -> Iterator[Finding]:
    here = {leg.ref for leg in answer.legs}
    for ref in answer.expected:
        if ref not in here:
            yield Finding(Kind.RELAY, name, f"chunks are expected for {_leg(ref)}, not there")
    if answer.kept_bytes and not here and not busy:
        what = f"{answer.kept_bytes} bytes are kept that nobody waits for"
        yield Finding(Kind.RELAY, name, what)


def _directory(
    name: str, told: frozenset[BlockHash] | None, held: frozenset[BlockHash]
) -> Iterator[Finding]:
    if told is None:
        yield Finding(Kind.DIRECTORY, name, "what is told of its blocks cannot be read")
        return
    if extra := told - held:
        what = "{count} blocks are told that its pool does not have"
        yield Finding(Kind.DIRECTORY, name, what, digests=extra)
    if untold := held - told:
        what = "{count} blocks of its pool are not told"
        yield Finding(Kind.DIRECTORY, name, what, digests=untold)


def _load(worker: WorkerFacts, answer: WorkerAnswer, owners: Owners) -> Iterator[Finding]:
    legs = frozenset((leg.ref, leg.phase, leg.blocks) for leg in answer.legs)
    load = worker.load
    if load is None:
        yield Finding(Kind.QUEUE, worker.name, "its load report cannot be read")
        return
    for field, told, own in (
        ("waiting requests", load.waiting_requests, answer.waiting),
        ("running requests", load.running_requests, answer.running),
        ("free blocks", load.free_blocks, answer.available_blocks),
        ("blocks", load.total_blocks, answer.total_blocks),
    ):
        if told != own:
            what = f"{field}: {told} in Redis, {own} at the worker"
            yield Finding(Kind.QUEUE, worker.name, what, meanwhile=frozenset(legs))
    if worker.assigned_tokens and not legs and not owners.busy(worker.incarnation):
        what = f"{worker.assigned_tokens} tokens are assigned to it, and it has no leg"
        yield Finding(Kind.QUEUE, worker.name, what)


def _router(router: RouterFacts, picture: Picture) -> Iterator[Finding]:
    name, answer = router.name, router.answer
    if router.absent:
        yield Finding(Kind.LEASE, name, f"a lease without a process: {router.absent}")
    if answer is None:
        return
    for gauge, told, own in (
        ("requests in flight", answer.requests_in_flight, answer.requests),
        ("queued legs", answer.queued, answer.waiting_legs),
    ):
        if told != own:
            yield Finding(Kind.GAUGE, name, f"{gauge}: counted {told}, there are {own}")
    workers = {worker.incarnation: worker for worker in picture.workers}
    had: dict[str, set[LegRef]] = {
        incarnation: {leg.ref for leg in worker.answer.legs}
        for incarnation, worker in workers.items()
        if worker.answer is not None
    }
    for leg in answer.legs:
        for worker in sorted(leg.told):
            if worker not in workers:
                what = f"{_leg(leg.ref)} is {leg.stage} at worker {worker[:12]}, which is gone"
                yield Finding(Kind.LEG, name, what)
            elif leg.ref not in had.get(worker, {leg.ref}):
                where = workers[worker].name
                what = f"{_leg(leg.ref)} is {leg.stage} at {where}, which does not have it"
                yield Finding(Kind.LEG, name, what)


def _ledger(row: LedgerRow, owners: Owners) -> Finding | None:
    if not row.readable:
        return Finding(Kind.LEDGER, "Redis", f"the record of {row.leg} cannot be read")
    if row.open and (problem := owners.problem_of(row)) is not None:
        what = f"the record of leg {row.leg} is open ({row.phase}): {problem}"
        return Finding(Kind.LEDGER, "Redis", what)
    return None


def _stray(stray: Stray) -> Finding:
    lasts = "for ever" if stray.ttl_ms == -1 else "too long"
    lives = f", and lives {lasts}" if stray.stays else ""
    what = f"{stray.family}:{stray.name} belongs to nobody who holds a lease{lives}"
    if stray.family == "leg":
        what = f"what leg {stray.name} was assigned counts {lasts}"
    return Finding(Kind.LEASE, "Redis", what)
