"""Which worker holds which prefix blocks: a router's view of the block directory in Redis.

A worker's blocks are loaded before it is used, then its batches are read as they come. Nothing ever
waits for that: decisions read what is known now, and it stays known while Redis is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from kvrelay.shared.errors import StoreError
from kvrelay.shared.kv.holdings import Replica
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.store.blocks import BlockReader

PACE_S: Final = 0.05
"""Between reads: however many workers tell something, it costs at most 20 round trips a second."""
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 2.0

log = logging.getLogger(__name__)


class Holdings(Protocol):
    """What decisions ask, by incarnation of a worker."""

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many blocks of this chain each worker holds, from its first one on without a gap.

        Workers that hold none are absent.
        """
        ...

    def forget(self, incarnation: str) -> None:
        """The worker is gone, or cannot be reached."""
        ...


class BlockDirectory:
    """`Holdings` of the workers that were followed and not forgotten since. On one event loop."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._reading: asyncio.Timeout | None = None
        self._failures = 0

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        counts = {name: replica.count(hashes) for name, replica in self._replicas.items()}
        return {name: count for name, count in counts.items() if count}

    def forget(self, incarnation: str) -> None:
        self._replicas.pop(incarnation, None)

    async def follow(self, incarnation: str) -> None:
        """Know this worker's blocks from now on: when it returns, all that Redis knew of.

        Ends soon. When Redis does not answer, they are loaded as soon as it does.
        """
        replica = Replica()
        with suppress(StoreError):
            await self._load(incarnation, replica)
        self._replicas[incarnation] = replica
        self._changed.set()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.reschedule(0)  # it waits for the others' batches only

    def known(self) -> dict[str, frozenset[BlockHash]]:
        """Everything. O(blocks): for tests and audits."""
        return {name: replica.held for name, replica in self._replicas.items()}

    async def run(self) -> None:
        """Read on until cancelled."""
        while True:
            try:
                await self._turn()
            except StoreError as error:
                await self._back_off(error)

    async def close(self) -> None:
        await self._reader.close()

    async def _turn(self) -> None:
        self._changed.clear()
        for incarnation, replica in [*self._replicas.items()]:
            if replica.needs_snapshot:
                log.info("loading the blocks of worker %s", incarnation)
                await self._load(incarnation, replica)
        if not self._replicas:
            await self._changed.wait()
            return
        if await self._read():
            await asyncio.sleep(PACE_S)  # the pace of reading, not a wait for something

    async def _load(self, incarnation: str, replica: Replica) -> None:
        snapshot, batches = await self._reader.load(incarnation)
        replica.load(snapshot)
        for batch in batches:
            replica.apply(batch)

    async def _read(self) -> bool:
        """Whether anything came before the set of workers changed."""
        positions = {name: replica.position for name, replica in self._replicas.items()}
        try:
            async with asyncio.timeout(None) as self._reading:
                batches = await self._reader.read(positions)
        except TimeoutError:
            return False
        finally:
            self._reading = None
        self._answers()
        for incarnation, batch in batches:
            if (replica := self._replicas.get(incarnation)) is not None:
                replica.apply(batch)
        return bool(batches)

    def _answers(self) -> None:
        if self._failures:
            log.info("the block directory is read again")
        self._failures = 0

    async def _back_off(self, error: StoreError) -> None:
        if self._failures == 0:
            log.warning("the block directory stays as it is: %s", error)
        wait_s = min(RETRY_FIRST_S * 2.0**self._failures, RETRY_MOST_S)
        self._failures = min(self._failures + 1, 10)
        await asyncio.sleep(wait_s)
