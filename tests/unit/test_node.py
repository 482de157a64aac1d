"""What a worker says to commands about attempts that it does not have; and that it looks at those
that it has."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.virtual import run_virtual

from kvrelay.shared.clock import SystemClock
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.lifecycle import QUIET_MS, Phase
from kvrelay.shared.rpc.convert import leg_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.types import Incarnation, LegSpec, SamplingParams
from kvrelay.shared.worker.journal import LegJournal
from kvrelay.shared.worker.node import Node
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender
from kvrelay.shared.worker.wiring import GONE

INCARNATION = Incarnation("e" * 32)
REF = pb.Ref(leg="a", attempt=0, nonce=1)
LEG = leg_to_wire(LegSpec("a", (1, 2, 3), SamplingParams(max_tokens=2)))
SERVE = pb.Command(serve=pb.Serve(ref=REF, leg=LEG, decode=pb.Peer(incarnation="d" * 32)))


class NoRunner:
    progress = 0

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        raise AssertionError("nothing is computed")


class Bench:
    """A node, and an engine whose events are handled here, as they are posted."""

    def __init__(self) -> None:
        clock = SystemClock()
        metrics = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})
        journal = LegJournal(Tracing.from_environment("t", "t", {}, clock), clock, metrics)
        self.node = Node(INCARNATION, journal, lambda: True)
        self.engine = Engine(EngineLimits(4, 8, 64, 64, 1000, b"test"), 16)
        self.posted: list[m.Event] = []
        loop = EngineLoop(self.engine, NoRunner(), Pace(64, 4, 10**9), self.node.deliver)
        loop.post = self._post  # type: ignore[method-assign]
        transport = LoopbackTransport(LoopbackHub())
        memory = memoryview(bytearray(64))
        parts = (transport, INCARNATION, lambda *_: memory, self._post, metrics)
        grammars = GrammarStore(lambda: pytest.fail("nobody asks for a grammar"))
        self.node.connect(loop, Sender(*parts), Receiver(*parts), grammars)
        self.outbox = Outbox()
        self.node.attach("r", self.outbox)

    def _post(self, event: m.Event) -> None:
        self.posted.append(event)
        self.node.deliver(self.engine.handle(event))

    def plan(self) -> None:
        self.node.deliver(self.engine.plan(64)[1])

    async def said(self) -> list[pb.Event]:
        return await self.outbox.take() or []


@pytest.mark.parametrize(
    ("command", "reason", "retryable"),
    [
        (pb.Command(room=pb.Room(ref=REF, run_blocks=[1])), pb.END_FAILED, True),
        (pb.Command(published=REF), pb.END_FINISHED, False),
        (pb.Command(cancel=REF), pb.END_CANCELLED, False),
    ],
    ids=["room", "published", "cancel"],
)
async def test_what_is_not_here_is_said_to_have_ended(
    command: pb.Command, reason: pb.End, retryable: bool
) -> None:
    bench = Bench()
    bench.node.command("r", command)
    (event,) = await bench.said()
    ended = event.ended
    assert (ended.ref, ended.reason, ended.retryable) == (REF, reason, retryable)
    assert ended.message == GONE and bench.posted == []


async def test_each_attempt_that_is_here_ends_once_also_if_it_is_cancelled_twice() -> None:
    bench = Bench()
    bench.node.command("r", SERVE)
    bench.node.command("r", pb.Command(cancel=REF))
    bench.node.command("r", pb.Command(cancel=REF))
    (event,) = await bench.said()
    assert event.ended.message == "" and event.ended.reason == pb.END_CANCELLED
    bench.node.command("r", pb.Command(cancel=REF))
    (event,) = await bench.said()
    assert event.ended.message == GONE
    bench.node.retire()


def test_room_that_is_never_granted_is_waited_for_no_longer_than_the_deadline() -> None:
    """The command was lost, and the router's cancel as well."""

    async def run() -> float:
        bench, loop = Bench(), asyncio.get_running_loop()
        bench.node.command("r", SERVE)
        bench.plan()
        (need_room,) = await bench.said()
        assert need_room.WhichOneof("kind") == "need_room"
        begun_s = loop.time()
        (ended,) = await bench.said()
        assert ended.ended.retryable and "nothing was heard" in ended.ended.message
        looks = len(bench.posted)
        await asyncio.sleep(1000)
        assert len(bench.posted) == looks, "at rest nothing looks"
        return loop.time() - 1000 - begun_s

    waited_s = run_virtual(run)
    limit_s = QUIET_MS[Phase.ASKING] / 1000
    assert limit_s <= waited_s <= limit_s * 1.1
