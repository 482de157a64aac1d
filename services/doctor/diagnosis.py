"""What is wrong with what was found, and what to do about it: a pure function of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from kvrelay.services.doctor.report import (
    Cluster,
    Finding,
    Level,
    Machine,
    Redis,
    Report,
    Worker,
)
from kvrelay.shared.store.keys import LATE_MS
from kvrelay.shared.store.records import fingerprint_difference
from kvrelay.shared.types import Role

LEAST_OPEN_FILES: Final = 1024
LEAST_SHARED_MEMORY: Final = 128 << 20
SLOW_REDIS_MS: Final = 20.0
DEAF_REDIS_MS: Final = 250.0
"""A router gives Redis no more time than this to answer."""
CLOCK_OFFSET_MS: Final = 50.0
SLOW_LANE_MB_PER_S: Final = 100.0


def diagnose(report: Report) -> tuple[Finding, ...]:
    found = [*_of_machine(report.machine)]
    if report.cluster is not None:
        found += _of_redis(report.cluster.redis)
        found += _of_cluster(report.cluster, report.cluster_asked_for)
    elif report.cluster_asked_for:
        remedy = "start it, or give another with --redis"
        found.append(wrong("redis", report.no_cluster, remedy))
    return tuple(sorted(found, key=lambda each: each.level is not Level.WRONG))


def wrong(subject: str, problem: str, remedy: str) -> Finding:
    return Finding(Level.WRONG, subject, problem, remedy)


def note(subject: str, problem: str, remedy: str) -> Finding:
    return Finding(Level.NOTE, subject, problem, remedy)


def _of_machine(machine: Machine) -> Iterator[Finding]:
    if not machine.versions.get("numpy"):
        yield note("engine", "not installed: this machine can only route", "kvrelay[engine]")
    elif machine.kernels == "reference":
        yield note(
            "kernels",
            f"torch computes, several times slower: {machine.kernels_reason}",
            "install a C++ compiler and install kvrelay again",
        )
    if machine.transport_problem:
        yield wrong("transport", machine.transport_problem, "repair UCX, or use --transport tcp")
    elif machine.transport.startswith("tcp"):
        yield note("transport", "no UCX: KV blocks travel over plain TCP", "kvrelay[ucx]")
    if machine.open_files < LEAST_OPEN_FILES:
        yield note(
            "open files",
            f"at most {machine.open_files}: each stream of a client takes one of a router's",
            f"ulimit -n {LEAST_OPEN_FILES} or more",
        )
    small = machine.shared_memory_bytes
    if small is not None and small < LEAST_SHARED_MEMORY and machine.transport.startswith("ucx"):
        yield note(
            "/dev/shm",
            f"{small >> 20} MiB: workers of one machine relay through it",
            "docker run --shm-size=1g, or a larger emptyDir",
        )


def _of_redis(redis: Redis) -> Iterator[Finding]:
    if redis.mode == "cluster":
        yield wrong("redis", "this is a Redis Cluster", "use a single server or Sentinel")
    if redis.max_memory_bytes and redis.eviction != "noeviction":
        yield wrong(
            "redis",
            f"maxmemory-policy is {redis.eviction}: a full server would drop leases",
            "CONFIG SET maxmemory-policy noeviction",
        )
    if redis.refuses_writes:
        yield wrong(
            "redis",
            "it cannot save to disk, and refuses writes for that",
            "repair its disk, or CONFIG SET stop-writes-on-bgsave-error no: nothing of kvrelay's "
            "need be saved",
        )
    if redis.round_trip_ms > DEAF_REDIS_MS:
        yield wrong(
            "redis",
            f"a round trip takes {redis.round_trip_ms:.0f} ms; routers wait {DEAF_REDIS_MS:.0f}",
            "bring it nearer",
        )
    elif redis.round_trip_ms > SLOW_REDIS_MS:
        yield note("redis", f"a round trip takes {redis.round_trip_ms:.0f} ms", "bring it nearer")


def _of_cluster(cluster: Cluster, asked_for: bool) -> Iterator[Finding]:
    for line in cluster.rejected:
        yield wrong("redis", f"a record that nobody can read: {line}", "end whoever writes it")
    if not cluster.workers and not cluster.routers:
        level = wrong if asked_for else note
        yield level(
            f"cluster {cluster.name}",
            "nobody is registered",
            "start kvrelay router, prefill and decode with this Redis, or give --cluster",
        )
        return
    if not cluster.routers:
        yield wrong("router", "none is registered", "start kvrelay router with this Redis")
    if not cluster.workers:
        yield wrong("workers", "none is registered", "start kvrelay prefill and kvrelay decode")
    for worker in cluster.workers:
        yield from _of_worker(worker)
    yield from _of_groups(cluster.workers)
    names = {worker.incarnation: worker.name for worker in cluster.workers}
    for pair in cluster.pairs:
        subject = f"{names[pair.prefill]} -> {names[pair.decode]}"
        if pair.problem:
            remedy = "open the transfer ports between both machines, or look at both logs"
            yield wrong(subject, f"cannot relay: {pair.problem}", remedy)
        elif pair.mb_per_s < SLOW_LANE_MB_PER_S:
            yield note(
                subject,
                f"relays {pair.mb_per_s:.0f} MB/s over {pair.carried_by}",
                "see that UCX finds the fast network (UCX_NET_DEVICES)",
            )


def _of_worker(worker: Worker) -> Iterator[Finding]:
    if worker.problem:
        yield wrong(
            worker.name, worker.problem, f"look at its log and at {worker.address}; start it again"
        )
    elif worker.lease_age_ms > LATE_MS:
        yield wrong(
            worker.name,
            f"renewed its lease {worker.lease_age_ms} ms ago",
            "see what keeps it from Redis",
        )
    if abs(worker.clock_offset_ms) > CLOCK_OFFSET_MS:
        yield note(
            worker.name,
            f"its clock differs from this machine's by {worker.clock_offset_ms:+.0f} ms: times in "
            "its logs and traces do, too",
            "synchronise clocks (chrony)",
        )


def _of_groups(workers: Sequence[Worker]) -> Iterator[Finding]:
    """Prefill workers without a decode worker of their group can do nothing (L12)."""
    groups: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        groups[worker.group].append(worker)
    by_size = sorted(groups.values(), key=lambda group: (_whole(group), len(group)), reverse=True)
    for group in by_size:
        if _whole(group):
            continue
        for worker in group:
            yield _alone(worker, by_size[0] if by_size[0] is not group else [], workers)


def _whole(group: Sequence[Worker]) -> bool:
    roles = {worker.role for worker in group}
    return Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles


def _alone(worker: Worker, main: Sequence[Worker], workers: Sequence[Worker]) -> Finding:
    other = next(iter(main), None) or next(
        (each for each in workers if each.group != worker.group), None
    )
    if other is not None:
        difference = fingerprint_difference(worker.fingerprint, other.fingerprint)
        return wrong(
            worker.name,
            f"is paired with nobody: it differs from {other.name} in {difference}",
            "start it with the settings and the version of the others",
        )
    if worker.role == Role.DECODE:
        remedy = "start kvrelay prefill"
        return note(worker.name, "has no prefill worker: it computes prompts itself", remedy)
    return wrong(worker.name, "has no decode worker", "start kvrelay decode")
