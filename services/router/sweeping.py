"""Which records of the ledger may be closed because their router is gone: pure decisions.

A lease that ended is a hint, no proof: a router that Redis forgot, or that cannot reach it, serves
on. Whoever sweeps has seen the lease missing for a whole lease period, look by look (an outage of
Redis, or of itself, begins that anew), and has the word of the workers that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.store.keys import LEASE_MS
from kvrelay.shared.store.records import OpenRecord

GRACE_NS: Final = LEASE_MS * 1_000_000


@dataclass(frozen=True, slots=True)
class Word:
    """What a worker says about a router."""

    attached: bool
    """The router is there and talks."""
    legs: frozenset[str] = frozenset()
    """Of the router's legs those that still hold something."""


@dataclass(slots=True)
class AbsenceWatch:
    """Since when which routers were seen to have no lease, without a gap in the looking."""

    since_ns: dict[str, int] = field(default_factory=dict)
    looked_ns: int = 0

    def overdue(self, absent: Set[str], now_ns: int) -> frozenset[str]:
        """Those of `absent`, as seen now, that were so for `GRACE_NS`."""
        if now_ns - self.looked_ns > GRACE_NS:
            self.blind()
        self.looked_ns = now_ns
        self.since_ns = {router: self.since_ns.get(router, now_ns) for router in absent}
        since = self.since_ns.items()
        return frozenset(router for router, seen_ns in since if now_ns - seen_ns >= GRACE_NS)

    def blind(self) -> None:
        """Nothing could be seen: what was before proves nothing any more."""
        self.since_ns = {}


def closable(records: Sequence[OpenRecord], words: Mapping[str, Word | None]) -> list[OpenRecord]:
    """Those of one router's overdue records that nobody speaks against.

    `words` has what each worker that is alive says about the router, None while it does not answer.
    A worker that is not in it is gone, with all it held.
    """
    return [
        record
        for record in records
        if not any(
            _speaks_against(record, words[worker]) for worker in record.workers & words.keys()
        )
    ]


def _speaks_against(record: OpenRecord, word: Word | None) -> bool:
    return word is None or word.attached or record.leg in word.legs
