"""What every transport keeps, over loopback, tcp, ucx in shared memory and ucx over TCP.

For all but loopback the far end is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvrelay.shared.errors import CorruptFrame, KvrelayError, PeerLost, TransferError
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.transfer.open import Scheme, open_transport
from kvrelay.shared.transfer.protocol import Address, Peer, Transport
from kvrelay.shared.transfer.wire import checksum

from .transport_child import FarEnd, payload

CHILD = Path(__file__).with_name("transport_child.py")
KINDS = ["loopback", "tcp", "ucx-shm", "ucx-tcp"]
pytestmark = pytest.mark.asyncio(loop_scope="module")
tags = itertools.count(1)


def scheme_of(kind: str) -> Scheme:
    return "tcp" if kind == "tcp" else "ucx"


@dataclass
class Far:
    """The far end, in this process or in another."""

    scheme: str
    end: FarEnd | None = None
    process: asyncio.subprocess.Process | None = None
    replies: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    address: Address | None = None

    async def ask(self, op: str, **arguments: Any) -> Any:
        number = next(tags)
        if self.end is not None:
            return await self.end.obey({"op": op, **arguments})
        assert self.process is not None and self.process.stdin is not None
        future = self.replies[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "op": op, **arguments})
        self.process.stdin.write(line.encode() + b"\n")
        reply = await future
        if "error" in reply:
            raise KvrelayError(reply["error"])
        return reply["value"]

    async def read_replies(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        while line := await self.process.stdout.readline():
            reply = json.loads(line)
            self.replies.pop(reply["id"]).set_result(reply)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self) -> None:
        if self.end is not None:
            await self.end.transport.close()
        if self.process is not None and self.reading is not None:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
            await self.reading


async def start_far(kind: str, hub: LoopbackHub) -> Far:
    if kind == "loopback":
        far = Far("loopback", FarEnd(LoopbackTransport(hub)))
    else:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(CHILD),
            scheme_of(kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        far = Far(scheme_of(kind), process=process)
        far.reading = asyncio.ensure_future(far.read_replies())
    far.address = Address(far.scheme, bytes.fromhex(await far.ask("listen")))
    return far


@dataclass
class Here:
    """This process's end, its far end, and how to get another one."""

    kind: str
    hub: LoopbackHub
    transport: Transport
    address: Address
    far: Far
    peer: Peer

    async def another(self) -> tuple[Far, Peer]:
        far = await start_far(self.kind, self.hub)
        return far, await self.meet(far)

    async def meet(self, far: Far) -> Peer:
        """Both ends connect to each other, as prefill and decode do."""
        assert far.address is not None
        await far.ask("connect", scheme=far.scheme, address=self.address.value.hex())
        return await self.transport.connect(far.address)

    async def far_send(self, tag: int, seed: int, size: int, far: Far | None = None) -> None:
        address = self.address.value.hex()
        await (far or self.far).ask("send", address=address, tag=tag, seed=seed, size=size)

    async def far_recv(self, tag: int, size: int) -> int:
        address = self.address.value.hex()
        return int(await self.far.ask("recv", address=address, tag=tag, size=size))


@pytest_asyncio.fixture(params=KINDS, loop_scope="module", scope="module")
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    kind: str = request.param
    hub = LoopbackHub()
    with pytest.MonkeyPatch.context() as patch:
        if kind.startswith("ucx"):
            pytest.importorskip("ucxx")
            patch.setenv("UCX_TLS", "tcp") if kind == "ucx-tcp" else patch.delenv("UCX_TLS", False)
            patch.delenv("UCX_RNDV_SCHEME", False)
        transport: Transport
        if kind == "loopback":
            transport = LoopbackTransport(hub)
        else:
            transport = open_transport(scheme_of(kind), host="127.0.0.1")
        address = await transport.listen()
        far = await start_far(kind, hub)
        ends = Here(kind, hub, transport, address, far, None)  # type: ignore[arg-type]
        ends.peer = await ends.meet(far)
        yield ends
        await far.stop()
        await transport.close()
        await hub.close()


SIZES = [0, 1, 4096, 8191, 8192, 16 * 1024, 1024 * 1024 + 1, 64 * 1024 * 1024]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("posted", ["before", "after"])
async def test_a_message_arrives_whole(here: Here, size: int, posted: str) -> None:
    tag, buffer = next(tags), bytearray(size)
    if posted == "before":
        receive = asyncio.ensure_future(here.transport.recv(here.peer, tag, buffer))
        await asyncio.sleep(0)
        send = asyncio.ensure_future(here.far_send(tag, 5, size))
    else:
        send = asyncio.ensure_future(here.far_send(tag, 5, size))
        await here.far_send(next(tags), 0, 1)  # by now the first one is under way
        receive = asyncio.ensure_future(here.transport.recv(here.peer, tag, buffer))
    await asyncio.gather(send, receive)
    assert buffer == payload(5, size)


async def test_messages_go_both_ways_under_many_tags_at_once(here: Here) -> None:
    rng = random.Random(7)
    plan = [(next(tags), seed, rng.choice([10, 9000, 70_000])) for seed in range(40)]
    buffers = {tag: bytearray(size) for tag, _, size in plan}
    work = [here.transport.recv(here.peer, tag, buffers[tag]) for tag, _, _ in plan]
    work += [here.far_send(tag, seed, size) for tag, seed, size in plan]
    out = [here.transport.send(here.peer, tag, payload(seed + 1, size)) for tag, seed, size in plan]
    back = [here.far_recv(tag, size) for tag, _, size in plan]
    rng.shuffle(work)
    _, *sums = await asyncio.gather(asyncio.gather(*work, *out), *back)
    assert sums == [checksum([payload(seed + 1, size)]) for _, seed, size in plan]
    assert [bytes(buffers[tag]) for tag, _, _ in plan] == [payload(s, n) for _, s, n in plan]


@pytest.mark.parametrize("size", [100, 20_000])
async def test_messages_of_one_tag_keep_their_order(here: Here, size: int) -> None:
    tag, buffers = next(tags), [bytearray(size) for _ in range(8)]
    half = [
        asyncio.ensure_future(here.transport.recv(here.peer, tag, each)) for each in buffers[:4]
    ]
    await asyncio.sleep(0)
    sends = [asyncio.ensure_future(here.far_send(tag, seed, size)) for seed in range(8)]
    await asyncio.gather(*half)
    for each in buffers[4:]:
        await here.transport.recv(here.peer, tag, each)
    await asyncio.gather(*sends)
    assert [bytes(each) for each in buffers] == [payload(seed, size) for seed in range(8)]


@pytest.mark.parametrize(
    ("sent", "expected"), [(50, 100), (100, 50), (70_000, 90_000), (90_000, 70_000)]
)
async def test_another_size_is_corrupt_for_that_receive_only(
    here: Here, sent: int, expected: int
) -> None:
    tag = next(tags)
    send = asyncio.ensure_future(here.far_send(tag, 1, sent))
    with pytest.raises(CorruptFrame, match=f"{expected} bytes"):
        await here.transport.recv(here.peer, tag, bytearray(expected))
    await send
    buffer = bytearray(sent)
    await asyncio.gather(here.far_send(tag, 2, sent), here.transport.recv(here.peer, tag, buffer))
    assert buffer == payload(2, sent)


@pytest.mark.parametrize("size", [100, 100_000])
async def test_a_cancelled_receive_leaves_buffer_and_message_alone(here: Here, size: int) -> None:
    tag, abandoned, wanted = next(tags), bytearray(size), bytearray(size)
    receive = asyncio.ensure_future(here.transport.recv(here.peer, tag, abandoned))
    await asyncio.sleep(0)
    receive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receive
    await asyncio.gather(here.far_send(tag, 3, size), here.transport.recv(here.peer, tag, wanted))
    assert wanted == payload(3, size)
    assert abandoned == bytes(size)


async def test_a_read_only_buffer_is_refused(here: Here) -> None:
    with pytest.raises(ValueError, match="writable"):
        await here.transport.recv(here.peer, next(tags), bytes(10))


async def test_closing_a_peer_ends_its_waiters_and_nobody_elses(here: Here) -> None:
    other, peer = await here.another()
    tag, kept_tag, buffer, kept = next(tags), next(tags), bytearray(9000), bytearray(9000)
    ours = asyncio.ensure_future(here.transport.recv(peer, tag, buffer))
    theirs = asyncio.ensure_future(here.transport.recv(here.peer, kept_tag, kept))
    await asyncio.sleep(0)
    await here.transport.close_peer(peer)
    await here.transport.close_peer(peer)
    with pytest.raises(PeerLost):
        await ours
    assert not peer.alive
    with pytest.raises(PeerLost):
        await here.transport.send(peer, tag, b"late")
    with pytest.raises(PeerLost):
        await here.transport.recv(peer, tag, bytearray(4))
    # The same tag from a peer that is still there does not reach the receive that was ended.
    send = asyncio.ensure_future(here.far_send(tag, 1, 9000))
    await asyncio.gather(theirs, here.far_send(kept_tag, 2, 9000))
    assert kept == payload(2, 9000)
    assert buffer == bytes(9000)
    await asyncio.gather(send, here.transport.recv(here.peer, tag, buffer))
    await other.stop()


async def test_connecting_again_gives_the_same_peer(here: Here) -> None:
    assert here.far.address is not None
    assert await here.transport.connect(here.far.address) is here.peer


@pytest.mark.parametrize("value", [b"", b"nonsense", b"\0" * 64])
async def test_a_damaged_address_is_refused(here: Here, value: bytes) -> None:
    with pytest.raises(TransferError):
        await here.transport.connect(Address(here.address.scheme, value))


async def test_an_address_of_another_scheme_is_refused(here: Here) -> None:
    with pytest.raises(TransferError, match="a smoke address cannot be reached over"):
        await here.transport.connect(Address("smoke", b"x"))


async def test_the_description_names_what_carries_the_bytes(here: Here) -> None:
    expected = {
        "loopback": "loopback (in process)",
        "tcp": "tcp (asyncio streams)",
        "ucx-tcp": "ucx (tcp)",
    }
    described = here.transport.describe()
    assert described == expected.get(here.kind, described)
    assert described.startswith(here.address.scheme)


async def test_waiting_costs_no_cpu(here: Here) -> None:
    waits = [
        asyncio.ensure_future(here.transport.recv(here.peer, next(tags), bytearray(1000)))
        for _ in range(20)
    ]
    await here.far_send(next(tags), 0, 10)  # nothing is left to settle
    start_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(0.3)
    busy = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert busy < 0.2


async def lost(here: Here, peer: Peer, receive: asyncio.Future[None]) -> None:
    """What the lease does when a peer's incarnation is dead."""
    await here.transport.close_peer(peer)
    with pytest.raises(PeerLost):
        await receive


async def under_way(buffer: bytearray) -> None:
    """Wait until the first part of a big message is here, and not yet its last."""
    while not buffer[len(buffer) // 16]:  # noqa: ASYNC110 - memory that fills gives no event
        await asyncio.sleep(0)


BIG = 128 * 1024 * 1024


@pytest.mark.parametrize("blow", ["killed", "killed in transfer", "frozen in transfer"])
async def test_a_dead_peer_costs_nothing_but_its_own_messages(here: Here, blow: str) -> None:
    if here.kind == "loopback":
        pytest.skip("loopback peers are not processes")
    other, peer = await here.another()
    tag, buffer = next(tags), bytearray(BIG if "transfer" in blow else 100_000)
    receive = asyncio.ensure_future(here.transport.recv(peer, tag, buffer))
    await asyncio.sleep(0)
    if "transfer" in blow:
        asyncio.ensure_future(other.ask("send", **far_send(here, tag, BIG)))  # noqa: RUF006
        await under_way(buffer)
    other.signal(signal.SIGSTOP if "frozen" in blow else signal.SIGKILL)
    if "killed" in blow:
        assert other.process is not None
        await other.process.wait()
    await here.transport.close_peer(peer)
    # A pull from frozen memory may have come to its end; nothing else is a success.
    outcome = (await asyncio.gather(receive, return_exceptions=True))[0]
    assert isinstance(outcome, PeerLost) or (blow.startswith("frozen") and outcome is None)
    seen = checksum([buffer])
    if "frozen" in blow:
        other.signal(signal.SIGCONT)
    await test_a_message_arrives_whole(here, 100_000, "before")
    assert checksum([buffer]) == seen
    await other.stop()
    if blow == "killed":
        await a_newcomer_is_met(here)


async def a_newcomer_is_met(here: Here) -> None:
    far, peer = await here.another()
    tag, arrived = next(tags), bytearray(50_000)
    await asyncio.gather(
        here.far_send(tag, 9, 50_000, far), here.transport.recv(peer, tag, arrived)
    )
    assert arrived == payload(9, 50_000)
    await far.stop()
    await here.transport.close_peer(peer)


def far_send(here: Here, tag: int, size: int) -> dict[str, Any]:
    return {"address": here.address.value.hex(), "tag": tag, "seed": 1, "size": size}
