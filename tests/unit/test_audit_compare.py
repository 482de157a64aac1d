"""What an audit makes of a picture: each kind of finding, and what a moving cluster is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.services.audit.compare import Finding, Kind, compare, staying
from kvrelay.services.audit.facts import (
    HeldLeg,
    Picture,
    RoutedLeg,
    RouterAnswer,
    RouterFacts,
    WorkerAnswer,
    WorkerFacts,
)
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.store.records import LoadRecord
from kvrelay.shared.store.survey import LedgerRow, Stray
from kvrelay.shared.types import LegRef

REF, OTHER = LegRef("a/0", 1, 0xBEEF), LegRef("b/0", 0, 0xCAFE)
LOAD = LoadRecord(0, 0, 1, 60, 64, 0.0, 0.0)
ROW = LedgerRow("a/0", "R", "decoding", "1", "P", "D")
HELD = frozenset((BlockHash(b"1" * 16), BlockHash(b"2" * 16)))
ANSWER = WorkerAnswer(
    legs=(HeldLeg(REF, "R", "running", 4),),
    total_blocks=64,
    available_blocks=60,
    running=1,
    digests=HELD,
)
WORKER = WorkerFacts("D", "decode-0", LOAD, 0, HELD, ANSWER)
LEG = RoutedLeg(REF, "decoding", frozenset("D"))
ROUTER = RouterFacts(frozenset("R"), "router", RouterAnswer((LEG,), 1, 1, 0, 0))
FINE = Picture((WORKER,), (ROUTER,), (ROW,))


def worker(**changes: Any) -> Picture:
    """The picture with another answer of the worker."""
    return replace(FINE, workers=(replace(WORKER, answer=replace(ANSWER, **changes)),))


def told(**changes: Any) -> Picture:
    """The picture with something else in Redis about the worker."""
    return replace(FINE, workers=(replace(WORKER, **changes),))


def router(**changes: Any) -> Picture:
    assert ROUTER.answer is not None
    return replace(FINE, routers=(replace(ROUTER, answer=replace(ROUTER.answer, **changes)),))


def said(picture: Picture) -> list[tuple[Kind, str, str]]:
    return [(finding.kind, finding.where, finding.text) for finding in compare(picture)]


def test_all_that_has_an_owner_is_no_finding() -> None:
    assert said(FINE) == []
    assert said(Picture()) == []


HELD_LEG = "leg a/0, attempt 1 (beef) is"


@pytest.mark.parametrize(
    ("phase", "blocks", "kind"),
    [
        ("running", 4, Kind.BLOCKS),
        ("draining", 4, Kind.BLOCKS),
        ("receiving", 4, Kind.RESERVATION),
        ("reserving", 0, Kind.RESERVATION),
        ("waiting", 0, Kind.LEG),
    ],
)
def test_a_leg_that_its_router_does_not_know(phase: str, blocks: int, kind: Kind) -> None:
    leg = HeldLeg(REF, "R", phase, blocks)
    picture = replace(worker(legs=(leg,)), routers=router(legs=(), requests=1).routers, ledger=())
    what = f"{HELD_LEG} {phase}, holding {blocks} blocks: its router R does not know it"
    assert said(picture) == [(kind, "decode-0", what)]


def test_a_leg_of_another_attempt_is_not_the_one_its_router_knows() -> None:
    stale = HeldLeg(replace(REF, attempt=0, nonce=7), "R", "running", 4)
    found = said(worker(legs=(*ANSWER.legs, stale)))
    assert [(kind, where) for kind, where, _ in found] == [(Kind.BLOCKS, "decode-0")]
    assert found[0][2].startswith("leg a/0, attempt 0 (7) is running")


def test_a_leg_and_a_record_whose_router_is_gone() -> None:
    assert said(replace(FINE, routers=())) == [
        (Kind.BLOCKS, "decode-0", f"{HELD_LEG} running, holding 4 blocks: its router R is gone"),
        (Kind.LEDGER, "Redis", "the record of leg a/0 is open (decoding): its router R is gone"),
    ]


def test_nobody_judges_for_a_router_that_gave_no_answer() -> None:
    assert said(replace(FINE, routers=(replace(ROUTER, answer=None),))) == []


def test_a_router_whose_lease_has_another_name_than_its_work_owns_it_all_the_same() -> None:
    renamed = replace(ROUTER, names=frozenset(("R", "R2")))
    assert said(replace(FINE, routers=(renamed,))) == []


def test_a_leg_that_its_worker_does_not_have() -> None:
    picture = replace(worker(legs=()), workers=(replace(WORKER, answer=replace(ANSWER, legs=())),))
    what = f"{HELD_LEG} decoding at decode-0, which does not have it"
    assert said(picture) == [(Kind.LEG, "router", what)]
    what = f"{HELD_LEG} decoding at worker D, which is gone"
    assert said(replace(FINE, workers=())) == [(Kind.LEG, "router", what)]
    assert said(told(answer=None)) == [], "it gave no answer: nobody can tell"


def test_what_a_worker_finds_of_itself() -> None:
    assert said(worker(problem="a block is in no state")) == [
        (Kind.POOL, "decode-0", "a block is in no state")
    ]


def test_what_the_relay_has_for_nobody() -> None:
    what = "chunks are expected for leg b/0, attempt 0 (cafe), not there"
    assert said(worker(expected=(REF, OTHER))) == [(Kind.RELAY, "decode-0", what)]
    assert said(worker(kept_bytes=9)) == [], "a leg is there that may wait for them"
    idle = replace(worker(legs=(), kept_bytes=9, running=0), routers=(), ledger=())
    idle = replace(
        idle, workers=(replace(idle.workers[0], load=replace(LOAD, running_requests=0)),)
    )
    assert said(idle) == [(Kind.RELAY, "decode-0", "9 bytes are kept that nobody waits for")]


def test_records_of_the_ledger() -> None:
    gone = replace(ROW, leg="c/0")
    assert said(replace(FINE, ledger=(replace(gone, phase="finished"),))) == []
    assert said(replace(FINE, ledger=(gone,))) == [
        (
            Kind.LEDGER,
            "Redis",
            "the record of leg c/0 is open (decoding): its router R does not know it",
        )
    ]
    assert said(replace(FINE, ledger=(replace(gone, phase="nonsense"),))) == [
        (Kind.LEDGER, "Redis", "the record of c/0 cannot be read")
    ]


def test_the_directory_and_the_pool() -> None:
    extra = BlockHash(b"3" * 16)
    [finding] = compare(told(directory=HELD | {extra}))
    assert (finding.kind, finding.digests) == (Kind.DIRECTORY, {extra})
    assert finding.text == "1 blocks are told that its pool does not have"
    assert said(told(directory=frozenset())) == [
        (Kind.DIRECTORY, "decode-0", "2 blocks of its pool are not told")
    ]
    assert said(told(directory=None)) == [
        (Kind.DIRECTORY, "decode-0", "what is told of its blocks cannot be read")
    ]


@pytest.mark.parametrize(
    ("load", "what"),
    [
        (replace(LOAD, waiting_requests=2), "waiting requests: 2 in Redis, 0 at the worker"),
        (replace(LOAD, running_requests=0), "running requests: 0 in Redis, 1 at the worker"),
        (replace(LOAD, free_blocks=9), "free blocks: 9 in Redis, 60 at the worker"),
        (replace(LOAD, total_blocks=9), "blocks: 9 in Redis, 64 at the worker"),
        (None, "its load report cannot be read"),
    ],
)
def test_the_queues(load: LoadRecord | None, what: str) -> None:
    assert said(told(load=load)) == [(Kind.QUEUE, "decode-0", what)]


def test_tokens_that_are_assigned_count_only_where_there_is_no_leg() -> None:
    assert said(told(assigned_tokens=50)) == []
    load = replace(LOAD, running_requests=0)
    answer = replace(ANSWER, legs=(), running=0)
    idle = WorkerFacts("E", "decode-1", load, 50, HELD, answer)
    what = "50 tokens are assigned to it, and it has no leg"
    assert said(replace(FINE, workers=(WORKER, idle))) == [(Kind.QUEUE, "decode-1", what)]


def test_the_gauges_of_a_router() -> None:
    assert said(router(requests_in_flight=3)) == [
        (Kind.GAUGE, "router", "requests in flight: counted 3, there are 1")
    ]
    assert said(router(queued=2)) == [(Kind.GAUGE, "router", "queued legs: counted 2, there are 0")]


def test_leases_without_a_process() -> None:
    dead = WorkerFacts("X", "prefill-0", absent="nobody listens at 10.0.0.7:1")
    lost = RouterFacts(frozenset("S"), "router", absent="nobody listens at 10.0.0.9:1")
    why = "a lease without a process: nobody listens at"
    assert said(replace(FINE, workers=(WORKER, dead), routers=(ROUTER, lost))) == [
        (Kind.LEASE, "prefill-0", f"{why} 10.0.0.7:1"),
        (Kind.LEASE, "router", f"{why} 10.0.0.9:1"),
    ]
    strays = (Stray("blocks", "X", 1000), Stray("load", "X", -1), Stray("leg", "a:decode", 90_000))
    picture = replace(FINE, strays=strays, rejected=("Y: worker record: json: must be an object",))
    assert said(picture) == [
        (Kind.LEASE, "Redis", "blocks:X belongs to nobody who holds a lease"),
        (Kind.LEASE, "Redis", "load:X belongs to nobody who holds a lease, and lives for ever"),
        (Kind.LEASE, "Redis", "what leg a:decode was assigned counts too long"),
        (Kind.LEASE, "Redis", "a record of Y: worker record: json: must be an object"),
    ]


def test_only_what_stays_is_listed() -> None:
    legs = tuple(HeldLeg(LegRef(f"{n}/0", 0, n), "R", "running", 1) for n in range(3))
    first, second = (
        compare(worker(legs=(*ANSWER.legs, *legs[:2]))),
        compare(worker(legs=(*ANSWER.legs, *legs[1:]))),
    )
    assert (len(first), len(second)) == (2, 2)
    [left] = staying(first, second)
    assert left.what.startswith("leg 1/0")
    assert staying(first, compare(FINE)) == []


def test_of_blocks_those_that_stay_are_listed() -> None:
    early, late = (frozenset(BlockHash(bytes([n]) * 16) for n in ns) for ns in ((7, 8), (8, 9)))
    first, second = (compare(told(directory=HELD | more)) for more in (early, late))
    [left] = staying(first, second)
    assert left.digests == early & late and left.text.startswith("1 blocks")
    other = compare(told(directory=HELD | (late - early)))
    assert staying(first, other) == []


def test_a_count_is_wrong_only_while_nothing_comes_or_goes() -> None:
    load = replace(LOAD, running_requests=2)
    one = compare(told(load=load))
    moved = replace(ANSWER, legs=(HeldLeg(REF, "R", "running", 5),))
    two = compare(told(load=load, answer=moved))
    assert len(one) == len(two) == 1
    assert staying(one, two) == []
    assert staying(one, one) == one


def test_braces_in_a_name_mean_nothing() -> None:
    assert Finding(Kind.LEDGER, "Redis", "the record of {count} {x}").text.endswith("{count} {x}")
