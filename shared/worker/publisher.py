"""Tells the block directory what this worker's pool holds: behind the steps, in batches.

The engine's thread only notes digests and, when there are any, wakes this; all else is done on the
event loop. While nothing changes, nothing is written and nobody wakes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvrelay.shared.errors import StoreError
from kvrelay.shared.kv.holdings import Publication
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.store.blocks import BlockLog, Written
from kvrelay.shared.tasks import TaskSet

EVERY_S: Final = 0.1
"""Between batches; after a rest the first one leaves at once."""
RETRY_MOST_S: Final = 1.6

log = logging.getLogger(__name__)


class BlockPublisher:
    """Of one incarnation, from its birth on the event loop to `close`; its pool is still empty."""

    def __init__(self, pool: BlockPool, blocks: BlockLog) -> None:
        self._touched = pool.watch()
        self._publication = Publication(pool.holds)
        self._log = blocks
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._awake = False
        self._failures = 0
        self._tasks = TaskSet()
        self._tasks.spawn(self._run())

    def look(self) -> None:
        """Something may have changed. For the engine's thread."""
        if self._touched and not self._awake:
            self._awake = True
            self._loop.call_soon_threadsafe(self._news.set)

    def registered(self) -> None:
        """Redis has the worker's lease, and no blocks of it yet. On the event loop."""
        self._publication.lost()
        self._news.set()

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._log.close()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self._awake = False  # before the digests are taken: who comes later wakes this again
            await self._publish()
            # The pace of batches, not a wait for something.
            await asyncio.sleep(min(EVERY_S * 2.0**self._failures, RETRY_MOST_S))

    async def _publish(self) -> None:
        edition = self._publication.next(self._take())
        if edition is None:
            return
        try:
            written = await self._log.write(*edition)
        except StoreError as error:
            self._failed(error)
            return
        if self._failures:
            log.info("the block directory is written again")
        self._failures = 0
        if written is not Written.DONE:
            self._publication.lost()
        if written is Written.BROKEN:
            self._news.set()

    def _failed(self, error: StoreError) -> None:
        if self._failures == 0:
            log.warning("the block directory waits: %s", error)
        self._failures = min(self._failures + 1, 4)
        self._publication.lost()
        self._news.set()

    def _take(self) -> list[BlockHash]:
        return [self._touched.popleft() for _ in range(len(self._touched))]
