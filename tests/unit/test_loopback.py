"""The in-process transport's faults: what is asked for happens, and a seed repeats it."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.shared.errors import CorruptFrame, PeerLost
from kvrelay.shared.transfer.faults import Fate, FaultPlan, FaultRates, Message, seeded_faults
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.transfer.protocol import Address, Peer

A, B = Address("loopback", b"1"), Address("loopback", b"2")


class VirtualSleep:
    """A clock that jumps from one wake-up to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []

    async def __call__(self, delay_s: float) -> None:
        event = asyncio.Event()
        self.sleepers.append((self.now_s + delay_s, event))
        await event.wait()

    async def run(self) -> None:
        """Until nobody sleeps any more."""
        await settle()
        while self.sleepers:
            self.sleepers.sort(key=lambda sleeper: sleeper[0])
            self.now_s, event = self.sleepers.pop(0)
            event.set()
            await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def linked(hub: LoopbackHub) -> tuple[LoopbackTransport, LoopbackTransport, Peer, Peer]:
    one, two = LoopbackTransport(hub), LoopbackTransport(hub)
    own, address = await one.listen(), await two.listen()
    return one, two, await one.connect(address), await two.connect(own)


def fated(*fates: Fate) -> FaultPlan:
    queue = list(fates)
    return lambda message: queue.pop(0) if queue else Fate()


async def arrivals(plan: FaultPlan, texts: list[bytes]) -> list[bytes | str]:
    """Send the texts under one tag; what receives of 4 bytes get, in order, until none comes."""
    sleep = VirtualSleep()
    hub = LoopbackHub(plan, sleep)
    one, two, peer, back = await linked(hub)
    for text in texts:
        await one.send(peer, 1, text)
    await sleep.run()
    got: list[bytes | str] = []
    while two._mailbox.kept_bytes:
        buffer = bytearray(4)
        try:
            await two.recv(back, 1, buffer)
            got.append(bytes(buffer))
        except CorruptFrame:
            got.append("corrupt")
    await one.close()
    await two.close()
    await hub.close()
    return got


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        ([], [b"aaaa", b"bbbb", b"cccc"]),
        ([Fate(copies=0)], [b"bbbb", b"cccc"]),
        ([Fate(copies=2)], [b"aaaa", b"aaaa", b"bbbb", b"cccc"]),
        ([Fate(delay_s=5.0)], [b"aaaa", b"bbbb", b"cccc"]),
        ([Fate(delay_s=5.0, overtaken=True)], [b"bbbb", b"cccc", b"aaaa"]),
        ([Fate(keep_bytes=3)], ["corrupt", b"bbbb", b"cccc"]),
        ([Fate(flip_bit=9)], [b"acaa", b"bbbb", b"cccc"]),
    ],
    ids=["none", "drop", "duplicate", "delay", "reorder", "truncate", "flip"],
)
async def test_each_fault_does_what_it_says(fates: list[Fate], expected: list[bytes | str]) -> None:
    assert await arrivals(fated(*fates), [b"aaaa", b"bbbb", b"cccc"]) == expected


async def test_delays_pass_on_the_injected_clock_alone() -> None:
    sleep = VirtualSleep()
    hub = LoopbackHub(fated(Fate(delay_s=3600.0)), sleep)
    one, two, peer, back = await linked(hub)
    await one.send(peer, 1, b"late")
    buffer = bytearray(4)
    receive = asyncio.ensure_future(two.recv(back, 1, buffer))
    await settle()
    assert not receive.done()
    await sleep.run()
    await receive
    assert (bytes(buffer), sleep.now_s) == (b"late", 3600.0)
    await hub.close()


def test_a_seed_repeats_its_faults() -> None:
    rates = FaultRates(drop=0.2, duplicate=0.2, delay=0.3, reorder=0.2, truncate=0.1, flip=0.1)
    messages = [Message(A, B, tag, bytes(100)) for tag in range(200)]
    first, again, other = (seeded_faults(seed, rates) for seed in (3, 3, 4))
    fates = [first(message) for message in messages]
    assert fates == [again(message) for message in messages]
    assert fates != [other(message) for message in messages]
    assert {fate.copies for fate in fates} == {0, 1, 2}
    assert max(fate.delay_s for fate in fates) <= rates.max_delay_s


async def test_a_peer_that_was_cut_off_is_silent_until_it_is_closed() -> None:
    hub = LoopbackHub()
    one, two, peer, _ = await linked(hub)
    receive = asyncio.ensure_future(one.recv(peer, 1, bytearray(4)))
    hub.cut(Address("loopback", b"2"))
    await one.send(peer, 2, b"gone")
    await settle()
    assert not receive.done()
    await one.close_peer(peer)
    with pytest.raises(PeerLost):
        await receive
    with pytest.raises(PeerLost, match="nobody listens"):
        await one.connect(Address("loopback", b"2"))
    await two.close()
    await hub.close()


async def test_messages_beyond_the_bound_wait_for_room() -> None:
    hub = LoopbackHub()
    one, two = LoopbackTransport(hub), LoopbackTransport(hub, unexpected_bytes=8)
    own, address = await one.listen(), await two.listen()
    peer, back = await one.connect(address), await two.connect(own)
    for tag in range(4):
        await one.send(peer, tag, b"%04d" % tag)
    await settle()
    assert two._mailbox.kept_bytes == 8
    for tag in range(4):
        buffer = bytearray(4)
        await two.recv(back, tag, buffer)
        assert buffer == b"%04d" % tag
    await two.close()
    await one.close()
    await hub.close()
    assert not hub._tasks
