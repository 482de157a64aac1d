"""All that a cluster has in Redis, read for an audit. Writes nothing, decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from kvrelay.shared.errors import StoreError
from kvrelay.shared.kv.holdings import Replica
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.store.blocks import BlockReader
from kvrelay.shared.store.connection import connect_async, mapped_errors
from kvrelay.shared.store.directory import ClusterSnapshot, ClusterStore
from kvrelay.shared.store.keys import ASSIGNED_TTL_MS, LEASE_MS, Keys
from kvrelay.shared.store.ledger import FINAL_RANK, RANK
from kvrelay.shared.store.records import RouterRecord

TIMEOUT_S: Final = 2.0
BATCH: Final = 500
OF_WORKERS: Final = ("worker", "load", "blocks", "events", "assigned")
TTL_MS: Final = {"assigned": ASSIGNED_TTL_MS, "leg": ASSIGNED_TTL_MS}
"""Of families whose keys age out by themselves, whoever wrote them; the others live one lease."""

_RANK_OF: Final = {phase.value: rank for phase, rank in RANK.items()}


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The record of one request, as it lies there."""

    leg: str
    router: str
    phase: str
    attempt: str
    prefill: str
    decode: str

    @property
    def open(self) -> bool:
        return _RANK_OF.get(self.phase, 0) < FINAL_RANK

    @property
    def readable(self) -> bool:
        return self.phase in _RANK_OF and bool(self.router)


@dataclass(frozen=True, slots=True)
class Stray:
    """A key of somebody who holds no lease."""

    family: str
    name: str
    ttl_ms: int
    """-1 for ever."""

    @property
    def stays(self) -> bool:
        """Whether it lives longer than such a key may."""
        return self.ttl_ms == -1 or self.ttl_ms > TTL_MS.get(self.family, LEASE_MS)


@dataclass(frozen=True, slots=True)
class Survey:
    cluster: ClusterSnapshot
    routers: tuple[RouterRecord, ...]
    ledger: tuple[LedgerRow, ...]
    rejected: tuple[str, ...]
    """Records of those who hold a lease that cannot be read, one line each."""
    directory: Mapping[str, frozenset[BlockHash] | None]
    """By worker that holds a lease; None where it cannot be read."""
    strays: tuple[Stray, ...]


class Surveyor:
    """Used from one event loop. All methods raise `StoreError`."""

    def __init__(self, url: str, keys: Keys) -> None:
        """Raises `ConfigError`; connects on first use."""
        self._url = url
        self._keys = keys
        self._store = ClusterStore(url, keys)
        self._blocks = BlockReader(url, keys)
        self._client = connect_async(url, connections=2)

    async def survey(self) -> Survey:
        cluster = await self._store.snapshot()
        with mapped_errors(self._url):
            names = await self._names()
            routers, rejected = await self._routers(cluster.routers)
            ledger = await self._ledger(names.get("req", []))
            strays = await self._strays(cluster, names)
        workers = [view.record.incarnation for view in cluster.workers]
        held = await asyncio.gather(*map(self._held, workers))
        directory: dict[str, frozenset[BlockHash] | None] = dict(zip(workers, held, strict=True))
        return Survey(cluster, routers, ledger, (*cluster.rejected, *rejected), directory, strays)

    async def close(self) -> None:
        await self._store.close()
        await self._blocks.close()
        await self._client.aclose()

    async def _names(self) -> dict[str, list[str]]:
        """Every key of the cluster, by family."""
        base = self._keys.prefix("").rstrip(":") + ":"
        names: dict[str, list[str]] = {}
        cursor = 0
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                cursor, found = await self._client.scan(cursor, match=f"{base}*", count=1000)
            for key in cast(list[bytes], found):
                family, _, name = key.decode(errors="replace").removeprefix(base).partition(":")
                names.setdefault(family, []).append(name)
            if cursor == 0:
                return names

    async def _routers(
        self, incarnations: frozenset[str]
    ) -> tuple[tuple[RouterRecord, ...], list[str]]:
        """Those that can be read, and why others cannot."""
        names = sorted(incarnations)
        if not names:
            return (), []
        async with asyncio.timeout(TIMEOUT_S):
            texts = cast(
                list[bytes | None], await self._client.mget([*map(self._keys.router, names)])
            )
        found: list[RouterRecord] = []
        rejected: list[str] = []
        for name, text in zip(names, texts, strict=True):
            if text is None:
                continue  # its lease ended meanwhile
            try:
                found.append(RouterRecord.from_json(text))
            except StoreError as error:
                rejected.append(f"{name[:32]}: {error}")
        return tuple(found), rejected

    async def _ledger(self, legs: Sequence[str]) -> tuple[LedgerRow, ...]:
        rows: list[LedgerRow] = []
        fields = ["router", "phase", "attempt", "prefill", "decode"]
        for start in range(0, len(legs), BATCH):
            batch = legs[start : start + BATCH]
            async with asyncio.timeout(TIMEOUT_S), self._client.pipeline(transaction=False) as all_:
                for leg in batch:
                    all_.hmget(self._keys.request(leg), fields)
                answers = await all_.execute(raise_on_error=False)
            for leg, answer in zip(batch, answers, strict=True):
                values = answer if isinstance(answer, list) else [b""] * len(fields)
                if values != [None] * len(fields):  # else it has expired meanwhile
                    rows.append(
                        LedgerRow(
                            leg, *((value or b"").decode(errors="replace") for value in values)
                        )
                    )
        return tuple(rows)

    async def _strays(
        self, cluster: ClusterSnapshot, names: Mapping[str, list[str]]
    ) -> tuple[Stray, ...]:
        live: set[str] = {view.record.incarnation for view in cluster.workers}
        live |= {line.partition(":")[0] for line in cluster.rejected}
        found = [(family, name) for family in OF_WORKERS for name in names.get(family, [])]
        found = [(family, name) for family, name in found if name not in live]
        routers = names.get("router", [])
        found += [("router", name) for name in routers if name not in cluster.routers]
        found += [("leg", name) for name in names.get("leg", [])]
        ttls: list[int] = []
        for start in range(0, len(found), BATCH):
            async with asyncio.timeout(TIMEOUT_S), self._client.pipeline(transaction=False) as all_:
                for family, name in found[start : start + BATCH]:
                    all_.pttl(self._keys.prefix(family) + name)
                ttls += await all_.execute()
        strays = (Stray(*key, ttl) for key, ttl in zip(found, ttls, strict=True))
        # A leg's assignments name no worker: that they age is all there is to see.
        return tuple(each for each in strays if each.ttl_ms != -2 and not _ages(each))

    async def _held(self, incarnation: str) -> frozenset[BlockHash] | None:
        try:
            snapshot, batches = await self._blocks.load(incarnation)
        except StoreError:
            return None
        replica = Replica()
        replica.load(snapshot)
        for batch in batches:
            replica.apply(batch)
        return None if replica.needs_snapshot else replica.held


def _ages(stray: Stray) -> bool:
    return stray.family in TTL_MS and not stray.stays
