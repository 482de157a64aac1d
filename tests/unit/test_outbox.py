"""What leaves together for a router, and what does not."""

from __future__ import annotations

import asyncio

from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.worker.outbox import Outbox


def event(number: int) -> pb.Event:
    return pb.Event(token=pb.Token(index=number))


async def taken(outbox: Outbox) -> list[int] | None:
    async with asyncio.timeout(1):
        events = await outbox.take()
    return None if events is None else [each.token.index for each in events]


async def test_a_message_ends_behind_what_is_large_and_nothing_is_lost() -> None:
    outbox = Outbox()
    for number in range(5):
        outbox.put(event(number))
        if number in (1, 2):
            outbox.cut()
    assert [await taken(outbox) for _ in range(3)] == [[0, 1], [2], [3, 4]]
    outbox.beat()
    assert await taken(outbox) == [], "a beat is answered without an event"
    outbox.put(event(5))
    outbox.cut()
    assert await taken(outbox) == [5]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(event(6))
    assert await waiting == [event(6)]


async def test_what_is_left_is_taken_once_it_is_closed() -> None:
    outbox = Outbox()
    outbox.put(event(0))
    outbox.cut()
    outbox.put(event(1))
    outbox.close()
    assert [await taken(outbox) for _ in range(3)] == [[0], [1], None]
