"""One incarnation of a worker: its engine, its relay and its node, from birth to `close`.

A worker that was given up by the others while it stood still goes on as a new session: the model
and the KV memory stay, everything that anyone could still refer to is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.shared.clock import Clock
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import EngineLoop
from kvrelay.shared.engine.messages import Instruction
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.plan import Plan, Runner
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.store.blocks import BlockLog
from kvrelay.shared.store.records import LoadRecord
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.transfer.protocol import Transport
from kvrelay.shared.types import Incarnation
from kvrelay.shared.worker.drain import Drain
from kvrelay.shared.worker.health import HealthWatch
from kvrelay.shared.worker.journal import LegJournal
from kvrelay.shared.worker.node import Node
from kvrelay.shared.worker.publisher import BlockPublisher
from kvrelay.shared.worker.receiver import Receiver
from kvrelay.shared.worker.recording import Record, unrecorded
from kvrelay.shared.worker.sender import BlockView, Sender
from kvrelay.shared.worker.wedge import WedgeGuard

_NO_TURN = -1


@dataclass(frozen=True, slots=True)
class Machinery:
    """What outlives an incarnation."""

    limits: EngineLimits
    target_step_ns: int
    tokens_beside_streams: int
    shared_duty: float
    view: BlockView
    blocks: int
    runner: Runner
    grammars: GrammarStore
    transport: Transport
    block_log: Callable[[Incarnation], BlockLog]
    metrics: WorkerMetrics
    tracing: Tracing
    clock: Clock
    on_engine_death: Callable[[], None]
    """Called on the engine's thread."""
    drain: Drain
    record: Record = unrecorded


class Session:
    """Made on the event loop; the engine's thread runs until `close`."""

    def __init__(self, incarnation: Incarnation, machinery: Machinery) -> None:
        self.incarnation = incarnation
        self._metrics = machinery.metrics
        self._transport = machinery.transport
        self._block_bytes = machinery.view(0, 1).nbytes
        limits = machinery.limits
        journal = self._journal = LegJournal(machinery.tracing, machinery.clock, machinery.metrics)
        self.node = Node(self.incarnation, journal, lambda: self.well)
        self.node.remaining_ms = lambda: machinery.drain.remaining_ms
        self.well = True
        """What `check_health` found last."""
        step_tokens, target_ns = limits.max_num_batched_tokens, machinery.target_step_ns
        beside = machinery.tokens_beside_streams
        self.pace = Pace(step_tokens, limits.block_size, target_ns, beside)
        self.engine = Engine(limits, machinery.blocks)
        self.publisher = BlockPublisher(
            self.engine.state.pool, machinery.block_log(self.incarnation)
        )
        machine, self._close_record = machinery.record(self.engine, self.incarnation)
        self.loop = EngineLoop(machine, machinery.runner, self.pace, self._deliver)
        self.loop.shared_duty = machinery.shared_duty
        self.loop.on_step = self._on_step
        self.loop.on_death = machinery.on_engine_death
        self._sender = Sender(
            machinery.transport,
            self.incarnation,
            machinery.view,
            self.loop.post,
            machinery.metrics,
        )
        self._sender.sent = journal.relayed
        self._receiver = Receiver(
            machinery.transport,
            self.incarnation,
            machinery.view,
            self.loop.post,
            machinery.metrics,
        )
        self.node.connect(self.loop, self._sender, self._receiver, machinery.grammars)
        self._clock = machinery.clock
        self._guard = WedgeGuard(self.loop, self._clock, self.node.progresses)
        self.node.on_work = self._guard.work_came
        self._health = HealthWatch()
        self._loaded = self._load_now()
        self._loaded_at = self.loop.turns.value
        self._counted = (0, 0, 0)
        self.loop.start()

    async def close(self) -> None:
        """End every stream, stop computing, and let go of all peers."""
        self.node.retire()
        await self._guard.close()
        await asyncio.to_thread(self.loop.stop)
        await asyncio.to_thread(self.node.gate.close)
        await self.publisher.close()
        await asyncio.to_thread(self._close_record)
        await self._sender.close()
        await self._receiver.close()

    def check_health(self) -> bool:
        """Whether the engine advanced lately or has nothing to do, however often that is asked."""
        now_ns, turn = self._clock.now_ns(), self.loop.turns.value
        if not self.loop.busy:  # asked at each renewal: nothing else is touched
            self._health.rested(now_ns, turn)
            self.well = True
        else:
            well = self._health.well(now_ns, turn, self.loop.progress)
            self.well = self.loop.alive and well
        return self.well

    def gauges(self) -> WorkerGauges:
        state = self.engine.state
        counts = state.pool.counts()
        return WorkerGauges(
            pool_blocks=counts.total,
            free_blocks=counts.free,
            cached_idle_blocks=counts.cached_idle,
            in_use_blocks=counts.in_use,
            quarantined_blocks=counts.quarantined,
            requests_waiting=len(state.waiting) + len(state.reserving),
            requests_running=len(state.running) + state.receiving,
            transfer_kept_bytes=self._transport.kept_bytes,
            block_bytes=self._block_bytes,
        )

    def load(self) -> LoadRecord:
        """The same object while nothing happens."""
        turn, busy = self.loop.turns.value, self.loop.busy
        if not busy and self._loaded_at == turn:
            return self._loaded
        # In the middle of a turn it is another one by the turn's end.
        self._loaded_at = _NO_TURN if busy else turn
        self._loaded = self._load_now()
        return self._loaded

    def _load_now(self) -> LoadRecord:
        state = self.engine.state
        waiting = [*state.waiting.values()]
        chunked = [leg.pending for leg in [*state.running] if leg.pending > 1]
        return LoadRecord(
            waiting_requests=len(waiting) + len(state.reserving),
            waiting_tokens=sum(leg.uncached for leg in waiting) + sum(chunked),
            running_requests=len(state.running) + state.receiving,
            free_blocks=state.pool.available,
            total_blocks=state.pool.total,
            prefill_tokens_per_s=self.pace.prefill_tokens_per_s,
            decode_tokens_per_s=self.pace.decode_tokens_per_s,
            relay_tokens_per_s=self._sender.time.tokens_per_s,
            cached_blocks=state.pool.counts().cached_idle,
        )

    def _deliver(self, out: list[Instruction]) -> None:
        """On the engine's thread."""
        self.node.deliver(out)
        self.publisher.look()

    def _on_step(self, plan: Plan, elapsed_ns: int) -> None:
        """On the engine's thread, after each step."""
        self.publisher.look()  # a step of a long prompt has nothing to deliver
        outputs = 0
        for row in plan.rows:
            if row.sample and row.index > 0:
                outputs += 1
            else:
                self._journal.computed(row.key, len(row.tokens), elapsed_ns)
        self.pace.observe_prompts(plan.tokens - outputs, elapsed_ns)
        self._metrics.step_ended(elapsed_ns / 1e9, plan.tokens - outputs, outputs)
        state = self.engine.state
        now = (state.preemptions, state.cache_hit_tokens, state.cache_miss_tokens)
        preempted, hits, misses = (a - b for a, b in zip(now, self._counted, strict=True))
        self._counted = now
        for _ in range(preempted):
            self._metrics.preempted()
        if hits or misses:
            self._metrics.prefix_looked_up(hits, misses)
