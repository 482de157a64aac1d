"""What an audit knows at one moment: what Redis has, and what each process says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.store.records import LoadRecord
from kvrelay.shared.store.survey import LedgerRow, Stray
from kvrelay.shared.types import LegRef


@dataclass(frozen=True, slots=True)
class HeldLeg:
    """A leg, as a worker has it."""

    ref: LegRef
    router: str
    phase: str
    blocks: int


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    legs: tuple[HeldLeg, ...] = ()
    total_blocks: int = 0
    available_blocks: int = 0
    """Free, or idle in the cache."""
    waiting: int = 0
    running: int = 0
    problem: str = ""
    digests: frozenset[BlockHash] = frozenset()
    expected: tuple[LegRef, ...] = ()
    """Attempts whose chunks its relay accepts."""
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker that holds a lease."""

    incarnation: str
    name: str
    load: LoadRecord | None = None
    """What it reported last."""
    assigned_tokens: int = 0
    """Given to it by routers since then, as Redis counts them."""
    directory: frozenset[BlockHash] | None = frozenset()
    """None where it cannot be read."""
    answer: WorkerAnswer | None = None
    """None when it gave none."""
    absent: str = ""
    """Why there is no such process, if there is none."""


@dataclass(frozen=True, slots=True)
class RoutedLeg:
    """A leg, as its router has it."""

    ref: LegRef
    stage: str
    told: frozenset[str]
    """Workers that may hold something of it."""


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    legs: tuple[RoutedLeg, ...] = ()
    requests_in_flight: int = 0
    """As its gauge says."""
    requests: int = 0
    """That the legs belong to."""
    queued: int = 0
    """As its bound on the queue counts."""
    waiting_legs: int = 0


@dataclass(frozen=True, slots=True)
class RouterFacts:
    names: frozenset[str]
    """Incarnations: one that stood still has another lease than its work goes by."""
    name: str
    answer: RouterAnswer | None = None
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    workers: tuple[WorkerFacts, ...] = ()
    routers: tuple[RouterFacts, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
    strays: tuple[Stray, ...] = ()
    rejected: tuple[str, ...] = ()
    """Records of workers that cannot be read, one line each."""
    silent: dict[str, str] = field(default_factory=dict)
    """Who was asked and gave no answer -> why."""
