"""The block directory in Redis: each worker's log of batches, and the snapshot it begins with.

Only the worker writes, under its lease; keys and batches carry its incarnation, and go with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, cast

from kvrelay.shared.kv.holdings import Batch, Snapshot
from kvrelay.shared.kv.prefix import HASH_BYTES, BlockHash
from kvrelay.shared.store.connection import connect_async, mapped_errors, script
from kvrelay.shared.store.keys import LEASE_MS, Keys

TIMEOUT_S: Final = 0.5
LOAD_TIMEOUT_S: Final = 0.25
"""Of all that one worker holds: a newly found one waits no longer for its blocks to be known."""
BLOCK_MS: Final = 60_000
"""How long a read waits for the next batch: each end of a wait costs a router at rest one round
trip. A server that vanished without a word is noticed by the connection itself."""

Entries = list[tuple[bytes, dict[bytes, bytes]]]

_log = logging.getLogger(__name__)


class Written(IntEnum):
    """What became of a batch."""

    DONE = 1
    BROKEN = 0
    """Redis lacks what it follows: the snapshot is to be written."""
    NO_LEASE = -1
    """Redis does not know this worker: it will register, and then all it holds is to be written."""


class BlockLog:
    """One incarnation's end, used from one event loop by one task."""

    def __init__(self, url: str, keys: Keys, incarnation: str) -> None:
        """Raises `ConfigError`; connects on first use."""
        self._url = url
        self._keys = [keys.worker(incarnation), keys.blocks(incarnation), keys.events(incarnation)]
        self._client = connect_async(url, connections=1)
        self._append = self._client.register_script(script("blocks"))

    async def write(self, batch: Batch, snapshot: Snapshot | None) -> Written:
        """One round trip. Raises `StoreError`; then it may be written, or not."""
        kind = "append" if snapshot is None else "whole" if batch.whole else "compact"
        held = b"".join(snapshot.held) if snapshot is not None else b""
        args = (batch.seq, kind, b"".join(batch.added), b"".join(batch.removed), held, LEASE_MS)
        with mapped_errors(self._url):
            async with asyncio.timeout(TIMEOUT_S):
                return Written(cast(int, await self._append(self._keys, args)))

    async def close(self) -> None:
        await self._client.aclose()


class BlockReader:
    """A router's end: one task reads, snapshots are loaded beside it."""

    def __init__(self, url: str, keys: Keys) -> None:
        """Raises `ConfigError`; connects on first use."""
        self._url = url
        self._keys = keys
        self._client = connect_async(url, connections=4)

    async def load(self, incarnation: str) -> tuple[Snapshot | None, list[Batch]]:
        """The snapshot and the batches behind it, of one instant. Raises `StoreError`.

        There is no snapshot while the batches begin with the first, or when it cannot be read.
        """
        with mapped_errors(self._url):
            async with asyncio.timeout(LOAD_TIMEOUT_S), self._client.pipeline() as both:
                both.hmget(self._keys.blocks(incarnation), ["at", "digests"])
                both.xrange(self._keys.events(incarnation))
                answer = cast(tuple[list[bytes | None], Entries], await both.execute())
        (seq, digests), entries = answer
        batches = [batch_from(*entry) for entry in entries]
        if seq is None or digests is None:
            return None, batches
        try:
            return Snapshot(int(seq), frozenset(split(digests))), batches
        except ValueError as error:
            _log.warning("the blocks of worker %s cannot be read: %s", incarnation, error)
            return None, batches

    async def read(self, positions: Mapping[str, int]) -> list[tuple[str, Batch]]:
        """The batches behind those of each worker, in order; at least one, or waits `BLOCK_MS`.

        Nothing is lost when it is cancelled: the same positions give the same batches again.
        Raises `StoreError`.
        """
        prefix = self._keys.prefix("events")
        streams = {prefix + incarnation: seq for incarnation, seq in positions.items()}
        with mapped_errors(self._url):
            async with asyncio.timeout(BLOCK_MS / 1_000 + TIMEOUT_S):
                answer = await self._client.xread(streams, block=BLOCK_MS)  # type: ignore[arg-type]
        return [
            (name.decode().removeprefix(prefix), batch_from(*entry))
            for name, entries in cast(list[tuple[bytes, Entries]], answer)
            for entry in entries
        ]

    async def close(self) -> None:
        await self._client.aclose()


def batch_from(entry: bytes, fields: Mapping[bytes, bytes]) -> Batch:
    """One that cannot be read says that the snapshot is needed."""
    seq = int(entry.partition(b"-")[0])
    try:
        return Batch(seq, split(fields[b"+"]), split(fields[b"-"]))
    except (KeyError, ValueError):
        return Batch(seq, whole=True)


def split(digests: bytes) -> tuple[BlockHash, ...]:
    """Raises `ValueError`."""
    if len(digests) % HASH_BYTES:
        raise ValueError(f"digests: {len(digests)} bytes, not a multiple of {HASH_BYTES}")
    cut = [digests[i : i + HASH_BYTES] for i in range(0, len(digests), HASH_BYTES)]
    return cast(tuple[BlockHash, ...], tuple(cut))
