"""A router's view of the cluster in Redis: who is alive, and a fair share of the work for each.

Every call ends within `TIMEOUT_S` or raises `StoreError`, and once Redis has failed to answer,
`assign` and `release` raise at once until a `snapshot` succeeded: a router that polls snapshots
loses no time of any request to a Redis that is away, and decides by its own view instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.connection import connect_async, mapped_errors, script, server_name
from kvrelay.shared.store.keys import ASSIGNED_TTL_MS, BUCKET_MS, DELIVERY_MS, LEASE_MS, Keys
from kvrelay.shared.store.records import MAX_COUNT, LoadRecord, WorkerRecord

TIMEOUT_S: Final = 0.25
CONNECTIONS: Final = 8

Run = Callable[[list[str], list[str | int]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker."""

    record: WorkerRecord
    load: LoadRecord | None
    """None when its report cannot be read."""
    assigned_tokens: int
    """Given to it by any router since that report."""
    renewed_ms: int = 0
    """Since its last renewal."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All who hold a lease, at one instant of Redis' clock."""

    workers: tuple[WorkerView, ...]
    routers: frozenset[str]
    """Incarnations."""
    rejected: tuple[str, ...]
    """Why records were ignored, one line each."""


class ClusterStore:
    """One per router, used from one event loop."""

    def __init__(self, url: str, keys: Keys) -> None:
        """Raises `ConfigError`; connects on first use."""
        self._url = url
        self._keys = keys
        self._client = connect_async(url, CONNECTIONS)
        self._snapshot = self._script("snapshot")
        self._assign = self._script("assign")
        self._release = self._script("release")
        self._away = False
        self._read = _Reader()

    async def snapshot(self) -> ClusterSnapshot:
        """One round trip. Raises `StoreError`."""
        prefixes = [self._keys.prefix(name) for name in ("worker", "load", "assigned")]
        answer = await self._ask(
            self._snapshot,
            [self._keys.workers, self._keys.routers],
            [*prefixes, LEASE_MS, DELIVERY_MS, BUCKET_MS],
        )
        routers, rows = cast(tuple[list[bytes], list[list[bytes]]], answer)
        return self._read.snapshot(
            frozenset(name.decode(errors="replace") for name in routers), rows
        )

    async def assign(
        self, candidates: Sequence[str], cost_tokens: int, router: str, leg: str
    ) -> str:
        """Pick the candidate with the least to do and add `cost_tokens` to that, in one step.

        What a worker has to do is what it reported plus what was assigned since its report; on
        a tie the one with fewer running requests wins, then the earlier in `candidates`. A leg
        given to the same worker twice counts once. Raises `StoreError`, also when Redis knows no
        candidate.
        """
        if not 0 <= cost_tokens < MAX_COUNT:
            raise ValueError(f"cost_tokens: must be 0 to {MAX_COUNT - 1}, found {cost_tokens}")
        self._fail_if_away()
        prefixes = [self._keys.prefix(name) for name in ("load", "assigned")]
        times = [DELIVERY_MS, BUCKET_MS, ASSIGNED_TTL_MS]
        chosen = await self._ask(
            self._assign,
            [self._keys.workers, self._keys.leg(leg)],
            [*prefixes, *times, router, cost_tokens, *candidates],
        )
        if not chosen:
            raise StoreError(f"none of {len(candidates)} candidates holds a lease")
        return cast(bytes, chosen).decode()

    async def release(self, leg: str, router: str) -> int:
        """Take back what `leg` still counts for, once; returns how many tokens that was.

        Needed only for a leg that ends before its worker reports it: later there is nothing left.
        Raises `StoreError`; then the tokens age out by themselves.
        """
        self._fail_if_away()
        args: list[str | int] = [self._keys.prefix("assigned"), router]
        return cast(int, await self._ask(self._release, [self._keys.leg(leg)], args))

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def available(self) -> bool:
        """Whether Redis answered last time."""
        return not self._away

    def _script(self, name: str) -> Run:
        registered = self._client.register_script(script(name))
        return lambda keys, args: registered(keys=keys, args=args)

    def _fail_if_away(self) -> None:
        if self._away:
            raise StoreError(f"Redis at {server_name(self._url)} does not answer")

    async def _ask(self, run: Run, keys: list[str], args: list[str | int]) -> object:
        try:
            with mapped_errors(self._url):
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await run(keys, args)
        except StoreError:
            self._away = True
            raise
        self._away = False
        return answer


class _Reader:
    """Records change seldom: what was read last time is not parsed again."""

    def __init__(self) -> None:
        self._records: dict[bytes, WorkerRecord] = {}
        self._loads: dict[bytes, LoadRecord] = {}

    def snapshot(self, routers: frozenset[str], rows: list[list[bytes]]) -> ClusterSnapshot:
        workers: list[WorkerView] = []
        rejected: list[str] = []
        records: dict[bytes, WorkerRecord] = {}
        loads: dict[bytes, LoadRecord] = {}
        for incarnation, text, report, assigned, renewed in rows:
            name = incarnation.decode(errors="replace")[:32]
            try:
                record = self._records.get(text) or WorkerRecord.from_json(text)
                if record.incarnation.encode() != incarnation:
                    raise StoreError("worker record: incarnation: is that of another")
            except StoreError as error:
                rejected.append(f"{name}: {error}")
                continue
            records[text] = record
            load: LoadRecord | None = None
            try:
                load = self._loads.get(report) or LoadRecord.from_json(report)
                loads[report] = load
            except StoreError as error:
                rejected.append(f"{name}: {error}")
            workers.append(WorkerView(record, load, int(assigned), int(renewed)))
        self._records, self._loads = records, loads
        return ClusterSnapshot(tuple(workers), routers, tuple(rejected))
