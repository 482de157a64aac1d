"""The worker's end of a router's stream, over real gRPC: who is silent, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.services.router.links import keep_library
from kvrelay.services.router.sweeper import held
from kvrelay.services.router.sweeping import Word
from kvrelay.shared.rpc.convert import PROTOCOL
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.worker.health import SILENT_BEATS
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.servicer import WorkerServicer

pytestmark = pytest.mark.leaks_allowed  # gRPC's threads
BEAT_S = 0.1
SERVE = pb.ToWorker(commands=pb.Commands(commands=[pb.Command(serve=pb.Serve())]))
CANCEL = pb.ToWorker(commands=pb.Commands(commands=[pb.Command(cancel=pb.Ref())]))
BEAT = pb.ToWorker(commands=pb.Commands())
Call = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]


class Commanded:
    """A node that works from `serve` to `cancel`, and says at each moment who is here."""

    incarnation = "w"
    serving = True

    def __init__(self) -> None:
        self.working: dict[str, bool] = {}
        self.outboxes: dict[str, Outbox] = {}
        self.served = asyncio.Event()
        self.left = asyncio.Event()

    def attach(self, owner: str, outbox: Outbox) -> None:
        self.working[owner] = False
        self.outboxes[owner] = outbox

    def detach(self, owner: str) -> None:
        del self.working[owner]
        self.left.set()

    def command(self, owner: str, command: pb.Command) -> None:
        self.working[owner] = command.WhichOneof("kind") == "serve"
        self.served.set()

    def works_for(self, owner: str) -> bool:
        return self.working[owner]

    def legs_of(self, router: str) -> list[str]:
        return ["a"] if router == "r" else []

    legs = 0

    @staticmethod
    def remaining_ms() -> int | None:
        return None

    async def inspect(self) -> pb.InspectReply:
        return pb.InspectReply()


@asynccontextmanager
async def attached(node: Commanded, beat_s: float = BEAT_S) -> AsyncIterator[tuple[Call, str]]:
    """A router's open stream, and the worker's address."""
    keep_library()
    server = grpc.aio.server()
    servicer = WorkerServicer(node, lambda budget_s: None)
    relay_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with asyncio.timeout(10), grpc.aio.insecure_channel(address) as channel:
            call: Call = worker_stub(channel).Attach()
            hello = pb.RouterHello(
                protocol=PROTOCOL, router="r", worker="w", beat_ms=round(beat_s * 1000)
            )
            await call.write(pb.ToWorker(hello=hello))
            await call.read()
            yield call, address
            call.cancel()
    finally:
        await server.stop(None)


async def left(node: Commanded, call: Call) -> float:
    """Seconds until the worker ends the stream with all that came by it."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with pytest.raises(grpc.aio.AioRpcError, match="the router was silent"):
        while True:
            await call.read()
    assert not node.working
    return loop.time() - begun_s


async def test_a_router_with_work_that_falls_silent_loses_all_it_has_here() -> None:
    node = Commanded()
    async with attached(node) as (call, _):
        await call.write(SERVE)
        assert SILENT_BEATS * BEAT_S * 0.9 < await left(node, call) < 3 * SILENT_BEATS * BEAT_S


async def test_one_that_reads_nothing_is_not_waited_for() -> None:
    """What is being written to it lies before all that could be said to it."""
    node = Commanded()
    async with attached(node) as (call, _):
        await call.write(SERVE)
        await node.served.wait()
        token = pb.Event(token=pb.Token(ref=pb.Ref(leg="x" * 1000)))
        (outbox,) = node.outboxes.values()
        for _ in range(10_000):
            outbox.put(token)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await node.left.wait()
        assert loop.time() - begun_s < 3 * SILENT_BEATS * BEAT_S


async def test_one_that_beats_is_kept_and_one_at_rest_need_not_beat() -> None:
    node = Commanded()
    async with attached(node) as (call, _):
        await call.write(SERVE)
        for _ in range(3 * SILENT_BEATS):
            await asyncio.sleep(BEAT_S)
            await call.write(BEAT)
        await call.write(CANCEL)
        await asyncio.sleep(2 * SILENT_BEATS * BEAT_S)
        assert [*node.working.values()] == [False]
        await call.write(SERVE)  # rest was no silence
        await asyncio.sleep((SILENT_BEATS - 1) * BEAT_S)
        assert [*node.working.values()] == [True]
        await left(node, call)


async def test_one_that_promised_no_beat_is_kept() -> None:
    node = Commanded()
    async with attached(node, beat_s=0) as (call, address):
        await call.write(SERVE)
        await asyncio.sleep(2 * SILENT_BEATS * BEAT_S)
        assert [*node.working.values()] == [True]
        assert await held("w", address, "r") == Word(True, frozenset({"a"}))


async def test_a_sweeper_hears_who_is_here_and_with_which_legs() -> None:
    async with attached(Commanded()) as (_, address):
        assert await held("w", address, "r") == Word(True, frozenset({"a"}))
        assert await held("w", address, "another") == Word(False)
        assert await held("the one before", address, "r") == Word(False)
        await asyncio.sleep(SILENT_BEATS * BEAT_S)
        assert await held("w", address, "r") == Word(False, frozenset({"a"}))
    assert await held("w", "127.0.0.1:1", "r") is None
