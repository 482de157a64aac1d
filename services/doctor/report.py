"""What was found on a machine and in a cluster, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    NOTE = "note"
    """Works, but not as well as it could."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    """The part that it is about."""
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine and what is installed on it."""

    versions: Mapping[str, str]
    """Of packages; empty for what is not installed."""
    processor: str
    features: tuple[str, ...]
    """Of those that kernels are made for."""
    kernels: str
    """What `--kernels auto` takes here."""
    kernels_reason: str
    native_lease: bool
    """The code that renews leases at rest was built."""
    threads: int
    memory_bytes: int
    shared_memory_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    open_files: int
    """`ulimit -n`."""
    transport: str
    """What `--transport auto` takes here, with the ways it may use."""
    transport_problem: str
    clock: str


@dataclass(frozen=True, slots=True)
class Redis:
    address: str
    version: str
    mode: str
    """`standalone`, `sentinel` or `cluster`."""
    round_trip_ms: float
    max_memory_bytes: int
    """0 is no limit."""
    eviction: str
    persistence: str
    refuses_writes: bool
    """It could not save its memory to disk, and was told to refuse writes then."""


@dataclass(frozen=True, slots=True)
class Router:
    name: str
    incarnation: str
    address: str
    lease_age_ms: int


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    role: str
    incarnation: str
    model: str
    address: str
    group: str
    fingerprint: Mapping[str, str]
    lease_age_ms: int
    problem: str = ""
    """Why it could not be asked, or what it says is wrong with it; empty if nothing is."""
    transport: str = ""
    round_trip_ms: float = 0.0
    """To this machine, over gRPC."""
    clock_offset_ms: float = 0.0
    """Its clock minus this machine's."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker of one group, by incarnation."""

    prefill: str
    decode: str
    problem: str = ""
    carried_by: str = ""
    round_trip_ms: float = 0.0
    mb_per_s: float = 0.0
    clock_offset_ms: float = 0.0
    """Decode's clock minus prefill's."""


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    redis: Redis
    routers: tuple[Router, ...] = ()
    workers: tuple[Worker, ...] = ()
    pairs: tuple[Pair, ...] = ()
    rejected: tuple[str, ...] = ()
    """Records that nobody can read, one line each."""


@dataclass(frozen=True, slots=True)
class Report:
    machine: Machine
    cluster: Cluster | None = None
    no_cluster: str = ""
    """Why there is none: what Redis said."""
    cluster_asked_for: bool = False
    """A person named its Redis: that there is none is wrong then."""
    findings: tuple[Finding, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0 nothing is wrong, 1 something is, 2 what was asked for could not be looked at."""
        if self.no_cluster and self.cluster_asked_for:
            return 2
        return int(any(finding.level is Level.WRONG for finding in self.findings))
