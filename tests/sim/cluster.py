"""A whole cluster in one process on virtual time: the real router core, nodes, engines and relay.

Simulated are the gRPC streams (a delay), Redis (nobody to ask), the transport (loopback with
faults), the model (a hash chain) and death: a killed worker falls silent and is noticed later.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tests.sim.model import BLOCK, VOCAB, ChainMemory
from tests.sim.virtual import VirtualClock

from kvrelay.services.router.admission import Admission
from kvrelay.services.router.dispatch import Deadlines, Dispatcher
from kvrelay.services.router.faulty import FaultyRoster
from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.observe import Observer
from kvrelay.services.router.placement import Placement
from kvrelay.services.router.policy import LiveWorker
from kvrelay.services.router.route import Mode
from kvrelay.services.router.running import RunningRequest
from kvrelay.shared.chaos.decide import Chaos, Injected
from kvrelay.shared.chaos.plan import ChaosPlan
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.messages import Event, Instruction
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.errors import StoreError, Unavailable
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.kv.prefix import BlockHash, group_of
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.ledger import Ledger
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.telemetry.metrics import (
    RouterGauges,
    RouterMetrics,
    WorkerGauges,
    WorkerMetrics,
)
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.types import Incarnation, Role, ValidRequest
from kvrelay.shared.worker.drain import Drain
from kvrelay.shared.worker.faulty import FaultyOutbox
from kvrelay.shared.worker.journal import LegJournal
from kvrelay.shared.worker.node import Node
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.sender import Sender

STREAM_S = 0.0005
STEP_S = 0.001
TOKEN_S = 0.0002
NOTICE_S = 1.0
FINGERPRINT = dict.fromkeys(FINGERPRINT_FIELDS, "sim")


def _no_tokenizer() -> NoReturn:
    raise AssertionError("nobody asks for a grammar here")


class SimEngineLoop:
    """The engine's loop on timers instead of a thread; checks L4 after every move."""

    def __init__(self, engine: Engine, memory: ChainMemory, node: Node) -> None:
        self.engine = engine
        self._memory = memory
        self._deliver = node.deliver
        self._inbox: list[Event] = []
        self._stepping = False
        self.dead = False

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if self.dead:
            return
        events, self._inbox = self._inbox, []
        for event in events:
            self._out(self.engine.handle(event))
        plan, out = self.engine.plan(budget=self.engine.state.limits.max_num_batched_tokens)
        self._out(out)
        if plan is None:
            self._stepping = bool(self._inbox)
            if self._stepping:
                asyncio.get_running_loop().call_soon(self._turn)
            return
        seconds = STEP_S + TOKEN_S * plan.tokens
        asyncio.get_running_loop().call_later(seconds, self._complete, plan)

    def _complete(self, plan: Plan) -> None:
        if self.dead:
            return
        self._out(self.engine.complete(plan, self._memory.run(plan)))
        asyncio.get_running_loop().call_soon(self._turn)

    def _out(self, out: list[Instruction]) -> None:
        self.engine.state.check()
        if out:
            self._deliver(out)


class SimWorker:
    """One start of one worker, and the router's stream to it."""

    def __init__(
        self, cluster: SimCluster, role: Role, number: int, blocks: int, weights: int
    ) -> None:
        self._cluster = cluster
        self.role = role
        self.weights = weights
        self.fingerprint = {**FINGERPRINT, "weights": str(weights)}
        self.incarnation = Incarnation(f"{cluster.rng.getrandbits(128):032x}")
        self.alive = True
        self.open = True
        """The router's end of the stream: until it misses the worker."""
        self.tokens_per_s = 0.0
        """What it reports of computing prompts."""
        memory = ChainMemory(blocks, weights)
        limits = EngineLimits(BLOCK, 16, 16, blocks * BLOCK, VOCAB, group_of(self.fingerprint))
        self.engine = Engine(limits, blocks)
        self.transport = LoopbackTransport(cluster.hub)
        metrics = WorkerMetrics(lambda: WorkerGauges(0, 0, 0, 0, 0, 0, 0), {})
        journal = LegJournal(
            Tracing.from_environment("sim", "sim", {}, cluster.clock), cluster.clock, metrics
        )
        self.node = Node(self.incarnation, journal, lambda: True)
        self.loop = SimEngineLoop(self.engine, memory, self.node)
        parts = (self.transport, self.incarnation, memory.view, self.loop.post, metrics)
        self.sender = Sender(*parts)
        self.receiver = Receiver(*parts)
        self.node.connect(
            self.loop,  # type: ignore[arg-type]
            self.sender,
            self.receiver,
            GrammarStore(_no_tokenizer),
        )
        self.name = f"{role}-{number}"
        self._blocks = blocks
        self._outbox = cluster.outbox(self.name, role)
        # A stream keeps its order, and timers of one moment do not.
        self._commands: deque[pb.Command] = deque()
        self._events: deque[pb.Event] = deque()
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        address = await self.transport.listen()
        self.record = WorkerRecord(
            incarnation=self.incarnation,
            role=self.role,
            name=self.name,
            model="sim",
            grpc_address="sim:1",
            metrics_address="",
            transfer_scheme=address.scheme,
            transfer_address=address.value,
            fingerprint=self.fingerprint,
            block_size=BLOCK,
            pool_blocks=self._blocks,
            max_model_len=self._blocks * BLOCK,
            max_num_seqs=16,
        )
        self.node.attach("router", self._outbox)
        self._task = asyncio.create_task(self._stream())

    def send(self, command: pb.Command) -> None:
        """The router's end of the stream."""
        self._commands.append(pb.Command.FromString(command.SerializeToString()))
        asyncio.get_running_loop().call_later(STREAM_S, self._told)

    def _told(self) -> None:
        command = self._commands.popleft()
        if self.alive:
            self.node.command("router", command)

    async def _stream(self) -> None:
        loop = asyncio.get_running_loop()
        while events := await self._outbox.take():
            for event in events:
                self._events.append(event)
                loop.call_later(STREAM_S, self._heard)

    def _heard(self) -> None:
        event = self._events.popleft()
        if self.alive:
            self._cluster.dispatcher.on_event(self.incarnation, event)

    async def kill(self) -> None:
        """Silence, in the middle of whatever it was doing. Peers are told nothing."""
        self.alive = False
        self.loop.dead = True
        self._task.cancel()
        await self.sender.close()
        await self.receiver.close()
        await self.transport.close()

    def load(self) -> LoadRecord:
        state = self.engine.state
        pool = state.pool
        waiting = sum(leg.uncached for leg in state.waiting.values())
        return LoadRecord(
            waiting_requests=len(state.waiting),
            waiting_tokens=waiting + sum(leg.pending for leg in state.running if leg.pending > 1),
            running_requests=len(state.running),
            free_blocks=pool.available,
            total_blocks=pool.total,
            prefill_tokens_per_s=self.tokens_per_s,
            decode_tokens_per_s=1 / TOKEN_S,
            relay_tokens_per_s=0.0,
        )


class Pools:
    """`Holdings` that looks into the workers' pools: a directory without delay."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    def held_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        held = {
            worker.incarnation: len(worker.engine.state.pool.lookup(hashes))
            for worker in self._cluster.workers.values()
        }
        return {name: count for name, count in held.items() if count}

    def forget(self, incarnation: str) -> None: ...


def name_of(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


class NoStore:
    """Redis is away: each router decides by its own view."""

    async def assign(
        self, candidates: Sequence[str], cost_tokens: int, router: str, leg: str
    ) -> str:
        raise StoreError("away")


@dataclass(slots=True)
class Shape:
    prefills: int = 2
    decodes: int = 2
    boths: int = 0
    blocks: int = 24
    route: Mode = "split"
    groups: int = 1
    """Of workers with the same weights; each group has all the workers above."""


class SimCluster:
    """Also the router's roster of workers."""

    def __init__(
        self,
        rng: random.Random,
        hub: LoopbackHub,
        shape: Shape,
        plan: ChaosPlan | None = None,
        injected: Injected = lambda step, fault: None,
    ) -> None:
        self.rng = rng
        self.plan = plan
        self._injected = injected
        self.hub = hub
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.workers: dict[str, SimWorker] = {}
        self._shape = shape
        self._changed = asyncio.Event()
        self._started = 0
        metrics = RouterMetrics(lambda: RouterGauges(0, {}))
        ledger = Ledger("redis://127.0.0.1:1/0", Keys("sim"), "router")
        self.observer = Observer(
            metrics, Tracing.from_environment("sim", "sim", {}, self.clock), ledger, self.clock
        )
        deadlines = Deadlines(60, 60, 60, 10, 60)
        admission = Admission(10_000, 1e6, self.clock)
        self.placement = Placement(NoStore(), Pools(self), self.clock, "router", shape.route)
        self.dispatcher = Dispatcher(self.placement, admission, self.observer, deadlines)
        chaos = plan and Chaos(plan, "router", "router", injected)
        self.dispatcher.join(FaultyRoster(self, chaos) if chaos else self)

    def outbox(self, part: str, role: Role) -> Outbox:
        """Of a worker's stream to the router."""
        if self.plan is None:
            return Outbox()
        return FaultyOutbox(Chaos(self.plan, part, role, self._injected))

    async def start(self) -> None:
        shape = self._shape
        for role, count in (
            (Role.PREFILL, shape.prefills),
            (Role.DECODE, shape.decodes),
            (Role.BOTH, shape.boths),
        ):
            for number in range(count * shape.groups):
                await self.add(role, number % shape.groups)

    async def add(self, role: Role, weights: int) -> SimWorker:
        worker = SimWorker(self, role, self._started, self._shape.blocks, weights)
        self._started += 1
        await worker.start()
        self.workers[worker.incarnation] = worker
        self._changed.set()
        return worker

    async def drain_and_restart(self, worker: SimWorker, seconds: float, after_s: float) -> None:
        """It ends when nothing is left with it, or its time is up."""
        drain = Drain(self.clock, seconds)
        worker.node.remaining_ms = lambda: drain.remaining_ms
        drain.begin()
        worker.node.announce_drain()
        await drain.wait(lambda: worker.node.legs)
        await worker.kill()
        await self._restart(worker, after_s)

    async def kill_and_restart(self, worker: SimWorker, after_s: float) -> None:
        await worker.kill()
        await asyncio.sleep(NOTICE_S)
        await self._restart(worker, after_s)

    async def _restart(self, worker: SimWorker, after_s: float) -> None:
        worker.open = False
        del self.workers[worker.incarnation]
        self.dispatcher.on_lost(worker.incarnation)
        self._changed.set()
        await asyncio.sleep(after_s)
        await self.add(worker.role, worker.weights)

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.kill()

    def series(self) -> dict[str, float]:
        """The router's metrics by full name."""
        found = self.observer.metrics.registry.collect()
        samples = [sample for family in found for sample in family.samples]
        return {
            name_of(sample.name, sample.labels): sample.value
            for sample in samples
            if not sample.name.endswith("_created")
        }

    # ---- the roster --------------------------------------------------------------------------

    def live(self) -> list[LiveWorker]:
        # A worker that was killed and not yet missed is chosen like any other.
        return [LiveWorker(worker.record, worker.load()) for worker in self.workers.values()]

    def link(self, incarnation: str) -> SimWorker | None:
        return self.workers.get(incarnation)

    def look(self) -> None: ...

    async def wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # ---- clients -----------------------------------------------------------------------------

    async def _accepted(self, request: ValidRequest) -> RunningRequest:
        """A client that was turned away, for nobody could serve it, comes again."""
        while True:
            try:
                return self.dispatcher.generate(request)
            except Unavailable:
                await asyncio.sleep(0.1)

    async def ask(self, request: ValidRequest, leave_after_s: float | None) -> list[list[int]]:
        """The tokens of each leg; with `leave_after_s` the client may go before they are whole."""
        events = await self.ask_events(request, leave_after_s)
        return [[event.token for event in each] for each in events]

    async def ask_events(
        self, request: ValidRequest, leave_after_s: float | None = None
    ) -> list[list[TokenEvent]]:
        answers: list[list[TokenEvent]] = [[] for _ in request.legs]
        generation = await self._accepted(request)
        try:
            async with asyncio.timeout(leave_after_s):
                async for event in generation:
                    assert event.index == len(answers[event.leg]), "each index once, in order"
                    answers[event.leg].append(event)
        except TimeoutError:
            pass
        finally:
            await generation.aclose()
            await generation.aclose()
        return answers
