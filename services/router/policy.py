"""Which workers could serve a leg, and which of them should: pure functions of a frozen view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvrelay.services.router.generation import Readiness
from kvrelay.shared.store.records import LoadRecord, WorkerRecord, fingerprint_difference
from kvrelay.shared.types import Role

NO_LOAD: Final = LoadRecord(0, 0, 0, 0, 0, 0.0, 0.0)
"""Of a worker that has reported none."""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker whose lease holds and whose stream is open."""

    record: WorkerRecord
    load: LoadRecord

    @property
    def incarnation(self) -> str:
        return self.record.incarnation


@dataclass(frozen=True, slots=True)
class Candidates:
    """Workers of one group that can serve a leg: a pair from `prefills` x `decodes`, or one of
    `alone` for the whole answer (role both, or decode when no prefill worker is left)."""

    prefills: tuple[LiveWorker, ...] = ()
    decodes: tuple[LiveWorker, ...] = ()
    alone: tuple[LiveWorker, ...] = ()

    @property
    def group(self) -> str:
        """Empty when there is nobody."""
        workers = (*self.prefills, *self.decodes, *self.alone)
        return workers[0].record.group if workers else ""

    @property
    def paired(self) -> bool:
        return bool(self.prefills and self.decodes)

    def __bool__(self) -> bool:
        return self.paired or bool(self.alone)


def candidates(
    workers: Sequence[LiveWorker], excluded: frozenset[str], group: str = ""
) -> Candidates:
    """Workers of `group`, or of the largest one, less `excluded` unless nothing else is left.

    Workers of different fingerprints are never mixed (L12): neither in a pair nor, by `group`, in
    the attempts at one answer.
    """
    if group:
        workers = [worker for worker in workers if worker.record.group == group]
    usable = [worker for worker in workers if worker.incarnation not in excluded]
    found = best_group(usable)
    return found if found or not excluded else best_group(workers)


def best_group(workers: Sequence[LiveWorker]) -> Candidates:
    groups: dict[str, list[LiveWorker]] = defaultdict(list)
    for worker in workers:
        groups[worker.record.group].append(worker)
    options = [in_group(members) for _, members in sorted(groups.items())]
    # Complete groups first, then the larger one; names break ties the same way on every router.
    return max(
        options,
        key=lambda c: (c.paired, bool(c), len(c.prefills) + len(c.decodes) + len(c.alone)),
        default=Candidates(),
    )


def in_group(members: Sequence[LiveWorker]) -> Candidates:
    by_role: Mapping[Role, list[LiveWorker]] = {
        role: [worker for worker in members if worker.record.role is role] for role in Role
    }
    prefills, decodes = by_role[Role.PREFILL], by_role[Role.DECODE]
    alone = by_role[Role.BOTH]
    if not prefills and not alone:
        alone = decodes
    return Candidates(tuple(prefills), tuple(decodes), tuple(alone))


def misfits(
    newcomers: Sequence[WorkerRecord], known: Sequence[WorkerRecord]
) -> Iterator[tuple[WorkerRecord, WorkerRecord, str]]:
    """Newcomers for whom nobody of `known` is a partner; each with one of the serving group, if
    there is one, and the field that keeps the two apart."""
    serving = best_group([LiveWorker(record, NO_LOAD) for record in known])
    best = [w.record for w in (*serving.decodes, *serving.prefills, *serving.alone)]
    for record in newcomers:
        others = [other for other in (*best, *known) if could_pair(record, other)]
        if not others or any(other.group == record.group for other in others):
            continue
        difference = fingerprint_difference(record.fingerprint, others[0].fingerprint)
        yield record, others[0], difference or ""


def could_pair(record: WorkerRecord, other: WorkerRecord) -> bool:
    """By role: two of the same that do not serve whole answers are no pair anyway."""
    if record.incarnation == other.incarnation:
        return False
    return not (record.role is other.role is not Role.BOTH)


def readiness(workers: Sequence[LiveWorker]) -> Readiness:
    found = candidates(workers, frozenset())
    if found.paired or any(worker.record.role is Role.BOTH for worker in found.alone):
        return Readiness(True, "")
    return Readiness(bool(found), _missing(workers))


def _missing(workers: Sequence[LiveWorker]) -> str:
    if not workers:
        return "no worker is alive"
    by_role = {worker.record.role: worker.record for worker in workers}
    if Role.PREFILL not in by_role or Role.DECODE not in by_role:
        missing = "prefill" if Role.DECODE in by_role else "decode"
        return f"no {missing} worker is alive"
    decode, prefill = by_role[Role.DECODE], by_role[Role.PREFILL]
    difference = fingerprint_difference(decode.fingerprint, prefill.fingerprint)
    return (
        f"no decode worker fits a prefill worker: {decode.name} differs from {prefill.name} in "
        f"{difference}"
    )
