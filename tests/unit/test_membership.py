"""The router's view of the workers while Redis is away."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvrelay.services.router.membership import Membership
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.keys import Keys


async def test_who_waits_for_workers_looks_again_also_while_redis_is_away() -> None:
    """A stream that opens again tells nobody; a leg whose workers were all lost waits for one."""
    store = ClusterStore("redis://127.0.0.1:1", Keys("t"))
    membership = Membership(store, "r", "ids", lambda *_: None, lambda _: None)
    running = asyncio.create_task(membership.run())
    await membership.first_view()
    async with asyncio.timeout(5):
        for _ in range(3):
            await membership.wait_change()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await store.close()
