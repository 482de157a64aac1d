"""The router's streams to the workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.services.router import links
from kvrelay.services.router.links import Link, keep_library
from kvrelay.shared.rpc.convert import PROTOCOL
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.servicer import WorkerServicer

LAST_LINK_ENDS = """
import asyncio, gc, os, sys, threading
from kvrelay.services.router.links import Link, keep_library

async def main():
    if sys.argv[1] == "kept":
        keep_library()
    link = Link("w", "ipv4:127.0.0.1:1", "r", lambda *_: None, lambda _: None)
    while threading.active_count() == 1:  # until gRPC's poller is there
        await asyncio.sleep(0.01)
    await link.close()
    del link
    for _ in range(30):  # its tasks end, and with them what they held
        await asyncio.sleep(0.01)
        gc.collect()
    print(threading.active_count(), flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize(("library", "threads"), [("kept", 2), ("dropped", 1)])
def test_the_last_link_that_ends_does_not_shut_grpc_down(library: str, threads: int) -> None:
    """In a process of its own, for any channel elsewhere would keep the library, too.

    The second case is gRPC's behaviour that the first one guards against: when it is gone, so may
    be `keep_library`.
    """
    program = [sys.executable, "-c", LAST_LINK_ENDS, library]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30)
    assert int(done.stdout) == threads


Context = grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]


@asynccontextmanager
async def serving(worker: relay_pb2_grpc.WorkerServicer) -> AsyncIterator[str]:
    """Its address."""
    keep_library()
    server = grpc.aio.server()
    relay_pb2_grpc.add_WorkerServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with asyncio.timeout(10):
            yield address
    finally:
        await server.stop(None)


class Greeter(relay_pb2_grpc.WorkerServicer):
    """A worker whose streams end when it is told so, and that answers nothing after the hello."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def Attach(self, request_iterator: AsyncIterator[pb.ToWorker], context: Context) -> None:
        await context.write(pb.FromWorker(hello=pb.WorkerHello(protocol=PROTOCOL, worker="w")))
        await self.end.wait()
        self.end.clear()


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_a_link_opens_when_it_is_prepared_each_time_anew() -> None:
    greeter = Greeter()
    asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()

    async def prepare(worker: str) -> None:
        done = asyncio.Event()
        asked.put_nowait(done)
        await done.wait()

    async with serving(greeter) as address:
        link = Link("w", address, "r", lambda *_: None, lost.put_nowait)
        link.prepare = prepare
        for _ in range(2):
            prepared = await asked.get()
            assert not link.open
            prepared.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert link.open
            greeter.end.set()
            assert await lost.get() == "w"
        assert not link.open
        await link.close()


class Commanded:
    """The node of a worker that is well and has nothing to say."""

    incarnation = "w"
    serving = True

    def __init__(self) -> None:
        self.commands: list[pb.Command] = []

    def attach(self, owner: str, outbox: Outbox) -> None: ...
    def detach(self, owner: str) -> None: ...
    def command(self, owner: str, command: pb.Command) -> None:
        self.commands.append(command)

    def works_for(self, owner: str) -> bool:
        return bool(self.commands)

    def legs_of(self, router: str) -> list[str]:
        return []

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        return pb.ProbeReply()

    async def inspect(self) -> pb.InspectReply:
        return pb.InspectReply()


async def opened(address: str, lost: asyncio.Queue[str]) -> Link:
    link = Link("w", address, "r", lambda *_: None, lost.put_nowait)
    await link.tried.wait()
    assert link.open
    return link


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_a_worker_that_is_silent_while_it_is_needed_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "BEAT_S", 0.2)
    silent, well = Greeter(), Commanded()
    async with (
        serving(silent) as dumb,
        serving(WorkerServicer(well, lambda budget_s: None)) as alive,
    ):
        lost: asyncio.Queue[str] = asyncio.Queue()
        other_lost: asyncio.Queue[str] = asyncio.Queue()
        link, other = await opened(dumb, lost), await opened(alive, other_lost)
        await asyncio.sleep(0.5)
        assert link.open and lost.empty()  # at rest nobody asks
        for each in (link, other):
            each.send(pb.Command(cancel=pb.Ref(leg="a")))
        await lost.get()
        await asyncio.sleep(0.5)
        assert other.open and other_lost.empty()
        assert [command.cancel.leg for command in well.commands] == ["a"]
        await link.close()
        await other.close()
