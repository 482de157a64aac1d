"""What `/ready` says of a cluster: whether it answers, and what it lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.services.router.generation import Readiness
from kvrelay.services.router.policy import LiveWorker, candidates, misfits, readiness
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.types import Incarnation, Role

READY = Readiness(True, "")


def worker(role: Role, **fingerprint: str) -> LiveWorker:
    record = WorkerRecord(
        incarnation=Incarnation(role.value),
        role=role,
        name=f"{role.value}-0",
        model="m",
        grpc_address="a:1",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=b"",
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x") | fingerprint,
        block_size=16,
        pool_blocks=1000,
        max_model_len=16_000,
        max_num_seqs=64,
    )
    return LiveWorker(record, LoadRecord(0, 0, 0, 1000, 1000, 1000.0, 100.0, 20_000.0))


PREFILL, DECODE, BOTH = worker(Role.PREFILL), worker(Role.DECODE), worker(Role.BOTH)
OTHER = worker(Role.DECODE, block_size="32")
MISFIT = (
    "no decode worker fits a prefill worker: decode-0 differs from prefill-0 in "
    "block_size: 32 against x"
)


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([], Readiness(False, "no worker is alive")),
        ([PREFILL], Readiness(False, "no decode worker is alive")),
        ([DECODE], Readiness(True, "no prefill worker is alive")),
        ([PREFILL, DECODE], READY),
        ([BOTH], READY),
        ([PREFILL, OTHER], Readiness(True, MISFIT)),
        ([PREFILL, OTHER, DECODE], READY),
    ],
)
def test_what_it_lacks(workers: list[LiveWorker], found: Readiness) -> None:
    assert readiness(workers) == found


def test_who_began_an_answer_is_not_replaced_by_others() -> None:
    """However many there are of another group, and whoever failed in the own one."""
    newer = [worker(role, weights="y") for role in (Role.PREFILL, Role.PREFILL, Role.DECODE)]
    workers = [PREFILL, DECODE, *newer]
    assert candidates(workers, frozenset()).group == newer[0].record.group
    own = PREFILL.record.group
    assert candidates(workers, frozenset(), own).decodes == (DECODE,)
    failed = frozenset({PREFILL.incarnation, DECODE.incarnation})
    assert candidates(workers, failed, own).prefills == (PREFILL,), "better than nobody"
    assert not candidates(newer, frozenset(), own)


def record(name: str, role: Role, **fingerprint: str) -> WorkerRecord:
    return replace(worker(role, **fingerprint).record, incarnation=Incarnation(name), name=name)


def test_each_misfit_is_compared_with_those_that_serve() -> None:
    """Whoever a router that has just started sees first."""
    known = [
        record("d8", Role.DECODE, block_size="32"),
        record("p9", Role.PREFILL, weights="y"),
        record("d0", Role.DECODE),
        record("p0", Role.PREFILL),
        record("d1", Role.DECODE),
    ]
    found = [(new.name, other.name, why) for new, other, why in misfits(known, known)]
    assert found == [
        ("d8", "p0", "block_size: 32 against x"),
        ("p9", "d0", "weights: y against x"),
    ]


@pytest.mark.parametrize(
    ("newcomer", "known"),
    [
        (record("p1", Role.PREFILL, weights="y"), [record("p0", Role.PREFILL)]),
        (record("p0", Role.PREFILL), []),
        (record("b1", Role.BOTH), [record("b0", Role.BOTH)]),
        (
            record("p1", Role.PREFILL, weights="y"),
            [record("d1", Role.DECODE, weights="y"), record("d0", Role.DECODE)],
        ),
    ],
    ids=["no pair anyway", "alone", "one of two", "rolled in"],
)
def test_who_has_a_partner_or_could_have_none_is_no_misfit(
    newcomer: WorkerRecord, known: list[WorkerRecord]
) -> None:
    assert [*misfits([newcomer], [*known, newcomer])] == []
