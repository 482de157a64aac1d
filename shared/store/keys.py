"""Every key and every lifetime kvrelay uses in Redis, in one place.

    kvrelay:{<cluster>}:worker:<incarnation>    string  JSON of a `WorkerRecord`; lives one lease
    kvrelay:{<cluster>}:load:<incarnation>      string  JSON of a `LoadRecord`; lives one lease
    kvrelay:{<cluster>}:router:<incarnation>    string  JSON of a `RouterRecord`; lives one lease
    kvrelay:{<cluster>}:workers                 zset    incarnation -> ms of its last renewal
    kvrelay:{<cluster>}:routers                 zset    the same for routers
    kvrelay:{<cluster>}:version                 int     grows when a member comes or goes
    kvrelay:{<cluster>}:blocks:<incarnation>    hash    seq; at, digests: the snapshot and its seq
    kvrelay:{<cluster>}:events:<incarnation>    stream  <seq>-0: + added, - removed; or = for all
    kvrelay:{<cluster>}:assigned:<incarnation>  hash    time bucket -> tokens assigned in it
    kvrelay:{<cluster>}:leg:<name>              hash    worker -> "router bucket tokens"
    kvrelay:{<cluster>}:req:<request id>        hash    the ledger's record of one request
    kvrelay:{<cluster>}:open:<incarnation>      zset    request id -> ms of its record's last write,
                                                        of a router's records that have not ended
    kvrelay:{<cluster>}:owners                  zset    the same for the routers with such records

The owner's incarnation is part of the key of everything it owns: nobody can renew or delete what
another owns, and a worker that restarts can never be taken for the one before it. All keys of a
cluster share a hash tag. Blocks and events live one lease, too; their digests are 16 bytes each,
one after the other. Times in values are Redis' own clock in milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvrelay.shared.errors import ConfigError

LEASE_MS: Final = 1_500
"""How long a worker or router counts as alive after its last renewal."""
RENEW_MS: Final = 500
"""Time between renewals: one may be lost before the lease ends, and idle workers wake rarely."""
LATE_MS: Final = 900
"""A member whose last renewal is older has missed one: routers look closely from here on, so that
by the end of its lease they know what it says itself. Before this, a renewal that came late by as
much as 0.4 s is nobody's concern."""
INDEX_TTL_MS: Final = 60_000
"""An index or a version nobody renews any more belongs to a cluster that is gone."""
BUCKET_MS: Final = 50
"""Resolution of the assigned tokens' age."""
DELIVERY_MS: Final = 50
"""An assignment this much older than a worker's load report is part of that report."""
ASSIGNED_TTL_MS: Final = 2 * LEASE_MS
"""Longer than any assignment counts: a worker without a report for one lease is dead."""
REQUEST_TTL_MS: Final = 60_000
"""A ledger record's life after its last write; live requests are written again before that."""

_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster. Raises `ConfigError` for a name that cannot be part of a key."""

    cluster: str

    def __post_init__(self) -> None:
        if not _CLUSTER.fullmatch(self.cluster):
            allowed = "must be 1 to 64 of the characters A-Z a-z 0-9 . _ -"
            raise ConfigError(f"cluster name {self.cluster[:80]!r}: {allowed}")

    def prefix(self, family: str) -> str:
        """What all keys of one family begin with, for scripts that append an incarnation."""
        return f"kvrelay:{{{self.cluster}}}:{family}:"

    def worker(self, incarnation: str) -> str:
        return self.prefix("worker") + incarnation

    def load(self, incarnation: str) -> str:
        return self.prefix("load") + incarnation

    def router(self, incarnation: str) -> str:
        return self.prefix("router") + incarnation

    def blocks(self, incarnation: str) -> str:
        return self.prefix("blocks") + incarnation

    def events(self, incarnation: str) -> str:
        return self.prefix("events") + incarnation

    def assigned(self, incarnation: str) -> str:
        return self.prefix("assigned") + incarnation

    def leg(self, name: str) -> str:
        return self.prefix("leg") + name

    def request(self, request_id: str) -> str:
        return self.prefix("req") + request_id

    def open_records(self, incarnation: str) -> str:
        return self.prefix("open") + incarnation

    @property
    def owners(self) -> str:
        return f"kvrelay:{{{self.cluster}}}:owners"

    @property
    def workers(self) -> str:
        return f"kvrelay:{{{self.cluster}}}:workers"

    @property
    def routers(self) -> str:
        return f"kvrelay:{{{self.cluster}}}:routers"

    @property
    def version(self) -> str:
        return f"kvrelay:{{{self.cluster}}}:version"
