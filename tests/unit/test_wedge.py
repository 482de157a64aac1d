"""A worker whose engine stands still in a step: what its routers and its probes are told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.services.router.links import Link, keep_library
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.rpc.convert import leg_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.rpc.health import WORKER_SERVICE, HealthServicer
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.types import Incarnation, LegSpec, SamplingParams
from kvrelay.shared.worker.journal import LegJournal
from kvrelay.shared.worker.node import Node
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender
from kvrelay.shared.worker.servicer import WorkerServicer
from kvrelay.shared.worker.wedge import WedgeGuard

INCARNATION = Incarnation("e" * 32)


class StuckRunner:
    """Stands still in its first step until it is let go."""

    def __init__(self) -> None:
        self.progress = 0
        self.stuck, self.go_on = threading.Event(), threading.Event()

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        self.stuck.set()
        self.go_on.wait(30)
        return StepResult(plan.step, {row.key: 7 for row in plan.rows if row.sample})


class StuckWorker:
    """Engine, node and guard as in a worker's session."""

    def __init__(self) -> None:
        clock, metrics = (
            SystemClock(),
            WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {}),
        )
        journal = LegJournal(Tracing.from_environment("t", "t", {}, clock), clock, metrics)
        self.runner = StuckRunner()
        self.node = Node(INCARNATION, journal, lambda: True)
        engine = Engine(EngineLimits(4, 8, 64, 64, 1000, b"test"), 16)
        self.loop = EngineLoop(engine, self.runner, Pace(64, 4, 10**9), self.node.deliver)
        transport = LoopbackTransport(LoopbackHub())
        memory = memoryview(bytearray(64))
        parts = (transport, INCARNATION, lambda *_: memory, self.loop.post, metrics)
        grammars = GrammarStore(lambda: pytest.fail("nobody asks for a grammar"))
        self.node.connect(self.loop, Sender(*parts), Receiver(*parts), grammars)
        self.guard = WedgeGuard(self.loop, clock, self.node.progresses)
        self.node.on_work = self.guard.work_came

    async def close(self) -> None:
        self.runner.go_on.set()
        await self.guard.close()
        await asyncio.to_thread(self.loop.stop)


@asynccontextmanager
async def stuck_worker() -> AsyncIterator[tuple[StuckWorker, str]]:
    keep_library()
    worker, server = StuckWorker(), grpc.aio.server()
    relay_pb2_grpc.add_WorkerServicer_to_server(
        WorkerServicer(worker.node, lambda budget_s: None), server
    )  # type: ignore[no-untyped-call]
    health = HealthServicer({"": lambda: worker.node.serving, WORKER_SERVICE: lambda: False})
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker.loop.start()
    try:
        async with asyncio.timeout(20):
            yield worker, address
    finally:
        await server.stop(None)
        await worker.close()


def serve() -> pb.Command:
    leg = leg_to_wire(LegSpec("a", (1, 2, 3), SamplingParams(max_tokens=2)))
    return pb.Command(serve=pb.Serve(ref=pb.Ref(leg="a", attempt=0, nonce=1), leg=leg))


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_a_wedged_engine_loses_its_routers_in_time_and_gets_them_back() -> None:
    async with stuck_worker() as (worker, address), grpc.aio.insecure_channel(address) as channel:
        lost: asyncio.Queue[str] = asyncio.Queue()
        link = Link(INCARNATION, address, "r", lambda *_: None, lost.put_nowait)
        probe = health_pb2_grpc.HealthStub(channel)
        everything = health_pb2.HealthCheckRequest()
        watch = probe.Watch(everything)
        await link.tried.wait()
        assert link.open
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        link.send(serve())
        await asyncio.to_thread(worker.runner.stuck.wait, 10)
        begun_s = time.monotonic()
        await lost.get()
        noticed_s = time.monotonic() - begun_s
        print(f"wedged: noticed after {noticed_s:.2f} s")
        assert noticed_s < 2.0  # L7
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await probe.Check(everything)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        worker.runner.go_on.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        while not link.open:
            link.tried.clear()
            await link.tried.wait()
        watch.cancel()
        await link.close()


@pytest.mark.leaks_allowed  # gRPC's threads
async def test_the_health_service_tells_its_services_apart_and_names_them() -> None:
    async with stuck_worker() as (_, address), grpc.aio.insecure_channel(address) as channel:
        probe = health_pb2_grpc.HealthStub(channel)
        answer = await probe.Check(health_pb2.HealthCheckRequest(service=WORKER_SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match=WORKER_SERVICE) as refused:
            await probe.Check(health_pb2.HealthCheckRequest(service="other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
