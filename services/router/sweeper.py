"""Closes what a router left open in the ledger when it died. Any router does it, for any other.

Workers cancel the work of a router that is gone by themselves, when its stream breaks or is silent;
a sweeper asks them, and closes records only. At rest it sleeps: somebody who comes or goes wakes
it, and it looks a few times, or for as long as a router with open records has no lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import grpc

from kvrelay.services.router.links import reason
from kvrelay.services.router.sweeping import GRACE_NS, AbsenceWatch, Word, closable
from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import StoreError
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.open_records import OpenRecords
from kvrelay.shared.store.records import OpenRecord

log = logging.getLogger(__name__)

LOOK_S: Final = (0.4, 0.8)
"""Time between two looks while there may be something: at random, so that routers take turns."""
REST_S: Final = (20.0, 40.0)
"""The same at rest, in case that nobody told of a change; a record lives longer than that."""
WATCHFUL_NS: Final = 2 * GRACE_NS
"""A lease that ends may be told of just before its key is gone."""
ASK_DEADLINE_S: Final = 0.5

Workers = Callable[[], Mapping[str, str]]
"""Those alive, as far as is known: incarnation -> address."""


class Sweeper:
    """One per router, on its event loop; `run` until cancelled."""

    def __init__(self, store: OpenRecords, router: str, workers: Workers, clock: Clock) -> None:
        self.swept = 0
        """Records closed; only grows."""
        self._store = store
        self._router = router
        self._workers = workers
        self._clock = clock
        self._absence = AbsenceWatch()
        self._stirred = asyncio.Event()
        self._watchful_until_ns = 0

    def look(self) -> None:
        """Somebody came or went."""
        self._stirred.set()

    async def run(self) -> None:
        self.look()
        while True:
            if self._stirred.is_set():
                self._watchful_until_ns = self._clock.now_ns() + WATCHFUL_NS
            self._stirred.clear()
            orphaned = False
            try:
                orphaned = await self._sweep()
            except StoreError as error:
                log.debug("not swept: %s", error)
                self._absence.blind()
            await self._pause(orphaned)

    async def _pause(self, orphaned: bool) -> None:
        if orphaned or self._clock.now_ns() < self._watchful_until_ns:
            # The looks' own pace, not a wait for something.
            await asyncio.sleep(random.uniform(*LOOK_S))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(*REST_S)):
                await self._stirred.wait()

    async def _sweep(self) -> bool:
        """One look, and what follows from it; whether a router without a lease has open records."""
        by_router: dict[str, list[OpenRecord]] = {}
        for record in await self._store.orphans():
            if record.router != self._router:  # Redis has lost this one's lease, for a moment
                by_router.setdefault(record.router, []).append(record)
        for router in self._absence.overdue(by_router.keys(), self._clock.now_ns()):
            await self._close(router, by_router[router])
        return bool(by_router)

    async def _close(self, router: str, records: Sequence[OpenRecord]) -> None:
        asked = frozenset[str]().union(*(record.workers for record in records))
        addresses = {name: at for name, at in self._workers().items() if name in asked}
        answers = await asyncio.gather(
            *(held(worker, address, router) for worker, address in addresses.items())
        )
        found = closable(records, dict(zip(addresses, answers, strict=True)))
        if not found:
            return
        closed = await self._store.close_swept(router, found, self._router)
        self.swept += closed
        if closed:
            log.info("router %s is gone: %d of its ledger's records closed", router, closed)


async def held(worker: str, address: str, router: str) -> Word | None:
    """What a worker says about `router`; None when it says nothing in time."""
    try:
        async with (
            asyncio.timeout(ASK_DEADLINE_S),
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
        ):
            reply = await worker_stub(channel).Held(pb.HeldRequest(router=router))
    except (grpc.RpcError, TimeoutError) as error:
        log.info("worker %s was not heard about router %s: %s", worker, router, reason(error))
        return None
    if reply.incarnation != worker:
        return Word(attached=False)  # another one in its place: what it held is gone
    return Word(reply.attached, frozenset(reply.legs))
