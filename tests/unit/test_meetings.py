"""Who is introduced to whom, and who is given work before it has met anybody."""

from __future__ import annotations

from kvrelay.services.router.meetings import (
    RETRY_S,
    UNMET_S,
    UNREACHED_S,
    WAIT_S,
    Meetings,
    Orders,
)
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, WorkerRecord
from kvrelay.shared.types import Incarnation, Role


def worker(name: str, role: Role, **fingerprint: str) -> WorkerRecord:
    return WorkerRecord(
        incarnation=Incarnation(name),
        role=role,
        name=name,
        model="m",
        grpc_address="a:1",
        metrics_address="",
        transfer_scheme="tcp",
        transfer_address=name.encode(),
        fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x") | fingerprint,
        block_size=16,
        pool_blocks=1000,
        max_model_len=16_000,
        max_num_seqs=64,
    )


P0, P1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL)
D0, D1 = worker("d0", Role.DECODE), worker("d1", Role.DECODE)
OTHER, BOTH = worker("other", Role.DECODE, block_size="32"), worker("both", Role.BOTH)


def told(orders: Orders) -> list[tuple[str, list[str]]]:
    return [
        (name, [peer.incarnation for peer in (*order.meet.decodes, *order.meet.prefills)])
        for name, order in orders
    ]


def met(meetings: Meetings, prefill: str, decode: str, now_s: float, problem: str = "") -> None:
    meetings.heard(prefill, pb.Met(decode=decode, problem=problem), now_s)


def test_a_newcomer_and_its_partners_are_told_of_all_their_partners_the_listeners_first() -> None:
    meetings = Meetings()
    assert told(meetings.opened(P0, 0)) == []
    assert told(meetings.opened(D0, 0)) == [("d0", ["p0"]), ("p0", ["d0"])]
    assert told(meetings.opened(P1, 0)) == [("d0", ["p0", "p1"]), ("p1", ["d0"])]
    assert told(meetings.opened(D1, 0)) == [
        ("d1", ["p0", "p1"]),
        ("p0", ["d0", "d1"]),
        ("p1", ["d0", "d1"]),
    ]


def test_workers_of_another_group_or_of_no_pair_are_introduced_to_nobody() -> None:
    meetings = Meetings()
    meetings.opened(P0, 0)
    assert meetings.opened(OTHER, 0) == meetings.opened(BOTH, 0) == []
    assert all(meetings.settled(record.incarnation, 0) for record in (P0, OTHER, BOTH))


def test_a_newcomer_gets_work_when_it_has_met_one_partner() -> None:
    meetings = Meetings()
    for record in (P0, D0):
        meetings.opened(record, 0)
    met(meetings, "p0", "d0", 0)
    assert meetings.settled("p0", 0) and meetings.settled("d0", 0)
    meetings.opened(P1, 10)
    assert not meetings.settled("p1", 10)
    assert meetings.settled("d0", 10), "who had work keeps it when somebody joins"
    met(meetings, "p1", "d0", 10)
    assert meetings.settled("p1", 10)


def test_a_peer_that_cannot_be_reached_keeps_a_newcomer_from_work_only_so_long() -> None:
    meetings = Meetings()
    meetings.opened(P0, 0)
    meetings.opened(D0, 0)
    met(meetings, "p0", "d0", 1, problem="no way")
    assert not meetings.settled("d0", WAIT_S)
    assert meetings.settled("d0", WAIT_S + 0.01)


def test_pairs_that_met_are_preferred_to_those_that_have_not_and_those_that_could_not() -> None:
    meetings = Meetings()
    for record in (P0, D0, D1):
        meetings.opened(record, 0)
    met(meetings, "p0", "d0", 0)
    assert (meetings.setup_s("p0", "d0"), meetings.setup_s("p0", "d1")) == (0, UNMET_S)
    met(meetings, "p0", "d1", 0, problem="no way")
    assert meetings.setup_s("p0", "d1") == UNREACHED_S
    assert meetings.due(RETRY_S) == []
    assert told(meetings.due(RETRY_S + 1)) == [("d1", ["p0"]), ("p0", ["d0", "d1"])]
    assert meetings.due(RETRY_S + 1) == [], "it has been told"


def test_nothing_is_known_any_more_of_a_worker_whose_stream_broke() -> None:
    meetings = Meetings()
    for record in (P0, D0):
        meetings.opened(record, 0)
    met(meetings, "p0", "d0", 0, problem="no way")
    meetings.closed("d0")
    met(meetings, "p0", "d0", 0)  # comes too late
    assert meetings.setup_s("p0", "d0") == UNMET_S
    assert not meetings.settled("d0", 0)
    assert meetings.due(100) == []


def test_those_who_are_there_hear_of_a_partner_that_is_gone() -> None:
    meetings = Meetings()
    for record in (P0, D0, P1, D1, OTHER):
        meetings.opened(record, 0)
    meetings.closed("d1")
    assert [(name, order.gone) for name, order in meetings.gone(P0)] == [("d0", "p0")]
    assert [(name, order.gone) for name, order in meetings.gone(D1)] == [("p0", "d1"), ("p1", "d1")]
