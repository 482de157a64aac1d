"""Everybody who holds a lease, with its age: for people, by one synchronous client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import redis

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.keys import LEASE_MS, Keys
from kvrelay.shared.store.records import RouterRecord, WorkerRecord

R = TypeVar("R", RouterRecord, WorkerRecord)


@dataclass(frozen=True, slots=True)
class Registered(Generic[R]):
    record: R
    lease_age_ms: int


@dataclass(frozen=True, slots=True)
class Census:
    workers: tuple[Registered[WorkerRecord], ...]
    routers: tuple[Registered[RouterRecord], ...]
    rejected: tuple[str, ...]
    """Why records were ignored, one line each."""


def take_census(client: redis.Redis, keys: Keys) -> Census:
    """Three round trips and one per member. Raises what redis-py raises."""
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    rejected: list[str] = []

    def living(
        index: str, key: Callable[[str], str], read: Callable[[bytes], R]
    ) -> tuple[Registered[R], ...]:
        found: list[Registered[R]] = []
        rows = client.zrangebyscore(index, f"({now_ms - LEASE_MS}", "+inf", withscores=True)
        for name, renewed_ms in cast(list[tuple[bytes, float]], rows):
            incarnation = name.decode(errors="replace")
            text = cast(bytes | None, client.get(key(incarnation)))
            if text is None:
                continue  # it left meanwhile
            try:
                found.append(Registered(read(text), max(now_ms - int(renewed_ms), 0)))
            except StoreError as error:
                rejected.append(f"{incarnation[:32]}: {error}")
        return tuple(found)

    workers = living(keys.workers, keys.worker, WorkerRecord.from_json)
    routers = living(keys.routers, keys.router, RouterRecord.from_json)
    return Census(workers, routers, tuple(rejected))
