"""What the doctor calls wrong, what only worth a note, and what it exits with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.services.doctor.diagnosis import CLOCK_OFFSET_MS, SLOW_LANE_MB_PER_S, diagnose
from kvrelay.services.doctor.report import (
    Cluster,
    Finding,
    Level,
    Machine,
    Pair,
    Redis,
    Report,
    Router,
    Worker,
)
from kvrelay.shared.store.records import FINGERPRINT_FIELDS

MACHINE = Machine(
    versions={"numpy": "2.4"},
    processor="x",
    features=("avx2",),
    kernels="native-avx2",
    kernels_reason="the fastest",
    native_lease=True,
    threads=2,
    memory_bytes=1 << 34,
    shared_memory_bytes=1 << 30,
    open_files=20_000,
    transport="ucx (posix)",
    transport_problem="",
    clock="tsc",
)
REDIS = Redis("r:1", "Redis 7", "standalone", 0.1, 0, "allkeys-lru", "none", False)


def worker(name: str, role: str, group: str = "g", **fingerprint: str) -> Worker:
    fields = dict.fromkeys(FINGERPRINT_FIELDS, "x") | fingerprint
    return Worker(name, role, f"i-{name}", "m", "a:1", group, fields, 100, transport="ucx")


P, D = worker("prefill-0", "prefill"), worker("decode-0", "decode")
ODD = worker("decode-9", "decode", "h", block_size="32")
PAIR = Pair(P.incarnation, D.incarnation, "", "posix", 0.2, 2_000.0)
HEALTHY = Cluster("c", REDIS, (Router("router", "r", "b:1", 100),), (P, D), (PAIR,))
REPORT = Report(MACHINE, HEALTHY, cluster_asked_for=True)


def found(report: Report) -> list[Finding]:
    return [*diagnose(report)]


def exit_code(report: Report) -> int:
    return replace(report, findings=diagnose(report)).exit_code


def test_nothing_is_said_of_what_is_well() -> None:
    assert found(REPORT) == [] and exit_code(REPORT) == 0


def test_no_redis_where_none_was_asked_for_is_no_fault_and_else_an_exit_code_of_its_own() -> None:
    unasked = Report(MACHINE, no_cluster="refused")
    assert found(unasked) == [] and exit_code(unasked) == 0
    asked = replace(unasked, cluster_asked_for=True)
    assert [each.problem for each in found(asked)] == ["refused"] and exit_code(asked) == 2


@pytest.mark.parametrize(
    ("machine", "level", "subject"),
    [
        (replace(MACHINE, versions={}), Level.NOTE, "engine"),
        (replace(MACHINE, kernels="reference"), Level.NOTE, "kernels"),
        (replace(MACHINE, transport_problem="no device"), Level.WRONG, "transport"),
        (replace(MACHINE, transport="tcp (asyncio streams)"), Level.NOTE, "transport"),
        (replace(MACHINE, open_files=256), Level.NOTE, "open files"),
        (replace(MACHINE, shared_memory_bytes=64 << 20), Level.NOTE, "/dev/shm"),
    ],
)
def test_of_a_machine(machine: Machine, level: Level, subject: str) -> None:
    report = replace(REPORT, machine=machine)
    assert [(each.level, each.subject) for each in found(report)] == [(level, subject)]
    assert exit_code(report) == (level is Level.WRONG)


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        (replace(REDIS, max_memory_bytes=1 << 30), "maxmemory-policy is allkeys-lru"),
        (replace(REDIS, mode="cluster"), "this is a Redis Cluster"),
        (replace(REDIS, refuses_writes=True), "refuses writes"),
        (replace(REDIS, round_trip_ms=300.0), "a round trip takes 300 ms; routers wait 250"),
        (replace(REDIS, round_trip_ms=30.0), "a round trip takes 30 ms"),
    ],
)
def test_of_a_redis(redis: Redis, words: str) -> None:
    [finding] = found(replace(REPORT, cluster=replace(HEALTHY, redis=redis)))
    assert words in finding.problem


@pytest.mark.parametrize(
    ("cluster", "level", "subject", "words"),
    [
        (replace(HEALTHY, routers=()), Level.WRONG, "router", "none is registered"),
        (Cluster("c", REDIS), Level.WRONG, "cluster c", "nobody is registered"),
        (
            replace(HEALTHY, workers=(P, replace(D, problem="does not answer: x")), pairs=()),
            Level.WRONG,
            "decode-0",
            "does not answer: x",
        ),
        (
            replace(HEALTHY, workers=(P, replace(D, lease_age_ms=1_200))),
            Level.WRONG,
            "decode-0",
            "renewed its lease 1200 ms ago",
        ),
        (
            replace(HEALTHY, workers=(P, D, ODD)),
            Level.WRONG,
            "decode-9",
            "it differs from prefill-0 in block_size: 32 against x",
        ),
        (
            replace(HEALTHY, workers=(P,), pairs=()),
            Level.WRONG,
            "prefill-0",
            "has no decode worker",
        ),
        (
            replace(HEALTHY, workers=(D,), pairs=()),
            Level.NOTE,
            "decode-0",
            "has no prefill worker",
        ),
        (
            replace(HEALTHY, pairs=(replace(PAIR, problem="no answer to a probe"),)),
            Level.WRONG,
            "prefill-0 -> decode-0",
            "cannot relay: no answer to a probe",
        ),
        (
            replace(HEALTHY, pairs=(replace(PAIR, mb_per_s=SLOW_LANE_MB_PER_S / 2),)),
            Level.NOTE,
            "prefill-0 -> decode-0",
            "relays 50 MB/s over posix",
        ),
        (
            replace(HEALTHY, workers=(P, replace(D, clock_offset_ms=-2 * CLOCK_OFFSET_MS))),
            Level.NOTE,
            "decode-0",
            "by -100 ms",
        ),
        (replace(HEALTHY, rejected=("x: bad",)), Level.WRONG, "redis", "x: bad"),
    ],
)
def test_of_a_cluster(cluster: Cluster, level: Level, subject: str, words: str) -> None:
    [finding] = found(replace(REPORT, cluster=cluster))
    assert (finding.level, finding.subject) == (level, subject)
    assert words in finding.problem and finding.remedy


def test_a_whole_group_beside_another_is_how_weights_are_rolled_out() -> None:
    others = worker("prefill-1", "prefill", "h", weights="y"), worker("decode-1", "decode", "h")
    unsplit = worker("both-0", "both", "k")
    workers = (P, D, *others, unsplit)
    assert found(replace(REPORT, cluster=replace(HEALTHY, workers=workers))) == []


def test_two_workers_that_fit_nobody_are_told_by_the_field_that_parts_them() -> None:
    cluster = replace(HEALTHY, workers=(P, ODD), pairs=())
    problems = {each.subject: each.problem for each in found(replace(REPORT, cluster=cluster))}
    assert "block_size: x against 32" in problems["prefill-0"]
    assert "block_size: 32 against x" in problems["decode-9"]


def test_what_is_wrong_comes_before_notes() -> None:
    machine = replace(MACHINE, open_files=256)
    report = Report(machine, replace(HEALTHY, routers=()), cluster_asked_for=True)
    assert [each.level for each in found(report)] == [Level.WRONG, Level.NOTE]
