"""Which prefill-decode pairs have tried their lane: workers do not know each other, a router does.

A worker that joins is told of its partners and they of it, each time with all that there are now:
so only lanes to workers that are gone fall idle. Prefill connects, tries the lane and says what it
found. Until a newcomer has met one partner it is given no work, so that no request waits for a
connection; but not for long, for a peer that cannot be reached must not keep it from others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.records import WorkerRecord
from kvrelay.shared.types import Role

WAIT_S: Final = 2.0
"""Longest time that a newcomer is kept from work because it has met nobody."""
RETRY_S: Final = 5.0
UNMET_S: Final = 0.05
"""What a pair that has not met yet is taken to cost more than one that has."""
UNREACHED_S: Final = 5.0
"""And one that tried in vain: for when there is no other."""

Orders = list[tuple[str, pb.Command]]
"""Incarnation of a worker, and what to tell it."""
_PARTNER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(slots=True)
class Guest:
    """A worker whose stream is open."""

    record: WorkerRecord
    since_s: float
    settled: bool = False
    """It was offered for work once, and stays so."""


class Meetings:
    """Plain state of one router; times are its loop's."""

    def __init__(self) -> None:
        self._guests: dict[str, Guest] = {}
        self._found: dict[tuple[str, str], tuple[pb.Met, float]] = {}
        """(prefill, decode) -> what prefill said of its lane, and when."""

    def opened(self, record: WorkerRecord, now_s: float) -> Orders:
        """Its stream opened, the first time or again."""
        self._guests[record.incarnation] = Guest(record, now_s)
        return self._introduce([record, *self._partners(record)])

    def closed(self, incarnation: str) -> None:
        self._guests.pop(incarnation, None)
        self._found = {pair: met for pair, met in self._found.items() if incarnation not in pair}

    def gone(self, record: WorkerRecord) -> Orders:
        """Its lease ended: its partners need not wait for the rest of what it began."""
        command = pb.Command(gone=record.incarnation)
        return [(partner.incarnation, command) for partner in self._partners(record)]

    def heard(self, prefill: str, met: pb.Met, now_s: float) -> None:
        if prefill in self._guests and met.decode in self._guests:
            self._found[prefill, met.decode] = met, now_s

    def due(self, now_s: float) -> Orders:
        """Pairs that met in vain try again."""
        again = [
            pair
            for pair, (met, at_s) in self._found.items()
            if met.problem and now_s - at_s > RETRY_S
        ]
        for pair in again:
            self._found[pair] = self._found[pair][0], now_s
        names = dict.fromkeys(name for pair in again for name in pair)
        return self._introduce(self._guests[name].record for name in names)

    def settled(self, incarnation: str, now_s: float) -> bool:
        """Whether it can be given work: nobody is there to be met, one was, or it took too long."""
        guest = self._guests.get(incarnation)
        if guest is None:
            return False
        guest.settled = guest.settled or self._ready(guest, now_s)
        return guest.settled

    def setup_s(self, prefill: str, decode: str) -> float:
        """What choosing this pair costs beyond computing and relaying."""
        found = self._found.get((prefill, decode))
        if found is None:
            return UNMET_S
        return UNREACHED_S if found[0].problem else 0.0

    def _ready(self, guest: Guest, now_s: float) -> bool:
        if now_s - guest.since_s > WAIT_S:
            return True
        partners = self._partners(guest.record)
        own = guest.record.incarnation
        met = (
            self._found.get(pair)
            for partner in partners
            for pair in ((own, partner.incarnation), (partner.incarnation, own))
        )
        return not partners or any(found is not None and not found[0].problem for found in met)

    def _partners(self, record: WorkerRecord) -> list[WorkerRecord]:
        role = _PARTNER.get(record.role)
        others = (guest.record for guest in self._guests.values())
        return [other for other in others if other.role is role and other.group == record.group]

    def _introduce(self, records: Iterable[WorkerRecord]) -> Orders:
        orders: Orders = []
        for record in records:
            peers = [peer_of(partner) for partner in self._partners(record)]
            if peers:
                to_prefill = record.role is Role.PREFILL
                meet = pb.Meet(decodes=peers) if to_prefill else pb.Meet(prefills=peers)
                orders.append((record.incarnation, pb.Command(meet=meet)))
        # Who listens is told first: then there is somebody to answer.
        return sorted(orders, key=lambda order: not order[1].meet.prefills)


def peer_of(record: WorkerRecord) -> pb.Peer:
    return pb.Peer(
        incarnation=record.incarnation,
        scheme=record.transfer_scheme,
        address=record.transfer_address,
    )
