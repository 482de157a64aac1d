"""The ledger: a journal of requests for audit, sweeping and people. Nothing ever waits for it.

Events go into a bounded queue and are written behind, many requests in one round trip. A record
only moves forward, to a later phase of its attempt or to a later attempt, and never out of an end.
One end is a guess: another router swept the record because this one seemed to be gone. A router
that was frozen or cut off and is back says so with its next event, and the record is open again.

What has not ended is indexed by its router, in the same step: who sweeps or audits finds it without
a look at other keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.connection import connect_async, mapped_errors, script
from kvrelay.shared.store.keys import REQUEST_TTL_MS, Keys

TIMEOUT_S: Final = 0.5
BATCH_EVENTS: Final = 256
REFRESH_S: Final = REQUEST_TTL_MS / 3_000
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 2.0

_log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SWEPT = "swept"
    """Its router was gone; only a sweeper says so."""


FINAL_RANK: Final = 4
RANK: Final = {
    Phase.QUEUED: 0,
    Phase.PREFILLING: 1,
    Phase.HANDING_OFF: 2,
    Phase.DECODING: 3,
    Phase.FINISHED: FINAL_RANK,
    Phase.CANCELLED: FINAL_RANK + 1,
    Phase.FAILED: FINAL_RANK + 2,
    Phase.SWEPT: FINAL_RANK + 3,
}
"""Moves go to a higher rank; phases may be skipped, because events may be dropped."""


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """The state of a request after it moved. Counts and owners only: no tokens, no block lists."""

    request_id: str
    phase: Phase
    attempt: int
    prefill: str = ""
    """Incarnation, "" while there is none."""
    decode: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    nonce: int = 0
    """Of the attempt."""

    @property
    def final(self) -> bool:
        return RANK[self.phase] >= FINAL_RANK


@dataclass(slots=True)
class LedgerCounts:
    """Events by what became of them; they only grow."""

    written: int = 0
    refused: int = 0
    """Illegal moves: a defect, or two routers with one request."""
    dropped: int = 0
    """The oldest, when the queue was full because Redis is away."""


class Ledger:
    """One per router. `record` and `run` belong to one event loop."""

    def __init__(self, url: str, keys: Keys, router: str, capacity_events: int = 10_000) -> None:
        """`router` is the incarnation that owns what is written. Raises `ConfigError`."""
        self.counts = LedgerCounts()
        self._url = url
        self._keys = keys
        self._router = router
        self._capacity_events = capacity_events
        self._queue: deque[LedgerEvent] = deque()
        self._live: dict[str, LedgerEvent] = {}
        self._work = asyncio.Event()
        self._try_now = asyncio.Event()
        self._client = connect_async(url, connections=1)
        self._journal = self._client.register_script(script("journal"))
        self._failures = 0

    def record(self, event: LedgerEvent) -> None:
        """Journal `event` some time soon. Never blocks, never fails."""
        if event.final:
            self._live.pop(event.request_id, None)
        else:
            self._live[event.request_id] = event
        self._enqueue(event)

    def registered(self) -> None:
        """Redis holds this router anew, and perhaps nothing else: all that is live is written."""
        self._enqueue_live()
        self._try_now.set()

    async def run(self) -> None:
        """Write behind, and keep the records of live requests from expiring, until cancelled."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        while True:
            # With no request live there is nothing to keep: an idle router sleeps on.
            await self._wait_for_work(refresh_at - loop.time() if self._live else None)
            if loop.time() >= refresh_at:
                refresh_at = loop.time() + REFRESH_S
                self._enqueue_live()
            await self._write_all()

    async def close(self) -> None:
        """Write what is left if Redis answers, and disconnect. Call after `run` has ended."""
        try:
            while self._queue:
                await self._write_batch()
        except StoreError as error:
            _log.warning("%d ledger events not written: %s", len(self._queue), error)
        await self._client.aclose()

    def _enqueue_live(self) -> None:
        for event in self._live.values():
            self._enqueue(event)

    def _enqueue(self, event: LedgerEvent) -> None:
        if len(self._queue) >= self._capacity_events:
            self._queue.popleft()
            self.counts.dropped += 1
        self._queue.append(event)
        self._work.set()

    async def _wait_for_work(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._work.wait()
        except TimeoutError:
            return

    async def _write_all(self) -> None:
        self._work.clear()
        while self._queue:
            try:
                await self._write_batch()
            except StoreError as error:
                await self._back_off(error)
            else:
                self._recovered()

    async def _write_batch(self) -> None:
        """One round trip. On failure the events are back in the queue, in their order."""
        batch = [self._queue.popleft() for _ in range(min(BATCH_EVENTS, len(self._queue)))]
        args: list[str | int] = [self._router, REQUEST_TTL_MS, FINAL_RANK]
        for event in batch:
            args += [event.phase, RANK[event.phase], event.attempt, event.prefill, event.decode]
            args += [event.prompt_tokens, event.output_tokens, event.nonce, event.request_id]
        try:
            with mapped_errors(self._url):
                async with asyncio.timeout(TIMEOUT_S):
                    refused = cast(int, await self._journal(self._written_keys(batch), args))
        except BaseException:
            self._put_back(batch)
            raise
        self.counts.refused += refused
        self.counts.written += len(batch) - refused

    def _written_keys(self, batch: list[LedgerEvent]) -> list[str]:
        index = [self._keys.owners, self._keys.open_records(self._router)]
        return [*index, *(self._keys.request(event.request_id) for event in batch)]

    def _put_back(self, batch: list[LedgerEvent]) -> None:
        room = max(self._capacity_events - len(self._queue), 0)
        kept = batch[len(batch) - min(room, len(batch)) :]
        self.counts.dropped += len(batch) - len(kept)
        self._queue.extendleft(reversed(kept))

    async def _back_off(self, error: StoreError) -> None:
        if self._failures == 0:
            _log.warning("the ledger waits: %s", error)
        wait_s = min(RETRY_FIRST_S * 2**self._failures, RETRY_MOST_S)
        self._failures = min(self._failures + 1, 10)
        self._try_now.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._try_now.wait()

    def _recovered(self) -> None:
        if self._failures:
            _log.info("the ledger is written again")
            self._failures = 0
