"""The worker's composition root, for every role: load, open the ports, register, serve."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from kvrelay import __version__
from kvrelay.shared.chaos.decide import Chaos, open_chaos
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.engine.constrained import ConstrainedRunner
from kvrelay.shared.errors import ConfigError, KvrelayError
from kvrelay.shared.grammar.store import grammar_store
from kvrelay.shared.lifeline import announce_ready
from kvrelay.shared.ports import authority, check_listen
from kvrelay.shared.rpc.convert import SERVER_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.store.blocks import BlockLog
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.presence import Presence, Subject
from kvrelay.shared.store.records import LoadRecord, WorkerRecord
from kvrelay.shared.telemetry import log as logs
from kvrelay.shared.telemetry.chaos import count_chaos
from kvrelay.shared.telemetry.metrics import WorkerGauges, WorkerMetrics
from kvrelay.shared.telemetry.scrape import serve_metrics
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.transfer.open import open_transport
from kvrelay.shared.transfer.protocol import Address
from kvrelay.shared.types import Incarnation
from kvrelay.shared.worker.affinity import apply_affinity, parse_cpus
from kvrelay.shared.worker.config import WorkerConfig
from kvrelay.shared.worker.drain import Drain
from kvrelay.shared.worker.facts import (
    Describe,
    Facts,
    Ports,
    fingerprint_of,
    limits_of,
    read_facts,
    recorder,
)
from kvrelay.shared.worker.faulty import FaultyOutbox
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.probes import grpc_health, http_probes
from kvrelay.shared.worker.recording import recording
from kvrelay.shared.worker.servicer import WorkerServicer
from kvrelay.shared.worker.session import Machinery, Session

if TYPE_CHECKING:
    from kvrelay.shared.worker.compute import Compute

log = logging.getLogger(__name__)

STREAM_GRACE_S = 0.5
SAME_SIGNAL_NS = 300_000_000
"""Some callers signal the process and its group: the second is no hurry."""
NOTHING_YET = WorkerGauges(0, 0, 0, 0, 0, 0, 0)


def run(config: WorkerConfig) -> int:
    """Serve until a signal; the exit status. Raises `KvrelayError` when it cannot start."""
    check_listen(config.host, config.port)
    apply_affinity(parse_cpus(config.cpu_affinity))  # before there is any other thread
    os.environ.update(compute_environment(config.compute_threads, os.environ))
    gc.disable()  # until it serves: libraries and model stay, looking through them is lost time
    return asyncio.run(Worker(config).serve())


def compute_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the compute library reads when it is loaded, unless the user set it."""
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait for work sleep: prefill and decode share the cores of one machine.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
    }
    return {name: value for name, value in defaults.items() if name not in environ}


class Worker:
    """One worker process. `serve` is its life; a session is one incarnation in it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._name = config.name or f"{config.role}-{os.getpid()}"
        self._clock = SystemClock()
        self._incarnation = Incarnation(secrets.token_hex(16))
        self._session: Session | None = None
        self._drain = Drain(self._clock, config.drain_s)
        self._asked_ns = 0
        self._presence: Presence | None = None
        self._status = 0
        speaker = logs.Speaker(
            config.role, self._name, lambda: self._incarnation, self._traceparent
        )
        logs.configure(speaker, config.log_level, config.log_format)

    async def serve(self) -> int:
        config = self._config
        record = recording(config, self._name)
        chaos = open_chaos(config.chaos, self._name, config.role)
        facts = await asyncio.to_thread(read_facts, config)
        metrics = self._metrics(chaos)
        probes = http_probes(asyncio.get_running_loop(), self._ailment)
        metrics_port, close_metrics = serve_metrics(
            metrics.registry, config.host, config.metrics_port, probes
        )
        compute = await asyncio.to_thread(computing, facts, config)
        grammars = grammar_store(facts.tokenizer, facts.model.vocab)
        log.info(facts.capacity.describe())
        transport = open_transport(
            config.transport, host=config.host, advertise=config.advertise_host, chaos=chaos
        )
        transfer = await transport.listen()
        log.info("the relay runs over %s", transport.describe())
        identity = await asyncio.to_thread(fingerprint_of, facts, config, compute.numerics)
        fingerprint = {**identity, "transport": transfer.scheme}
        tracing = Tracing.from_environment(
            f"kvrelay-{config.role}", self._name, os.environ, self._clock
        )
        machinery = Machinery(
            limits=limits_of(facts, config, fingerprint),
            target_step_ns=config.target_step_ms * 1_000_000,
            tokens_beside_streams=config.tokens_beside_streams,
            shared_duty=config.shared_duty,
            view=compute.view,
            blocks=facts.capacity.blocks,
            runner=ConstrainedRunner(compute.runner, grammars),
            grammars=grammars,
            transport=transport,
            block_log=partial(BlockLog, config.redis_url, Keys(config.cluster)),
            metrics=metrics,
            tracing=tracing,
            clock=self._clock,
            on_engine_death=self._watcher(asyncio.get_running_loop()),
            drain=self._drain,
            record=record,
        )
        session = self._session = Session(self._incarnation, machinery)
        outbox = Outbox if chaos is None else partial(FaultyOutbox, chaos)
        servicer = WorkerServicer(session.node, self._begin_drain, outbox=outbox)
        server, port = await self._listen(servicer)
        ports = Ports(*(authority(config.advertised_host, each) for each in (port, metrics_port)))
        describe = recorder(facts, config, self._name, fingerprint, ports)
        try:
            await self._registered(machinery, servicer, transfer, describe)
        finally:
            self._session.node.retire()
            await server.stop(STREAM_GRACE_S)
            await self._session.close()
            await transport.close()
            tracing.close()
            close_metrics()
        return self._status

    def _metrics(self, chaos: Chaos | None) -> WorkerMetrics:
        metrics = WorkerMetrics(
            self._gauges,
            self._info(),
            vllm_model=self._config.model if self._config.vllm_metric_names else "",
        )
        if chaos is not None:
            chaos.injected = count_chaos(metrics.registry)
        return metrics

    def _watcher(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """What the engine's thread calls when it dies: the process ends, its supervisor knows."""

        def died() -> None:
            loop.call_soon_threadsafe(self._end_with, 1)

        return died

    async def _listen(self, servicer: WorkerServicer) -> tuple[grpc.aio.Server, int]:
        """Raises `ConfigError` naming the setting when the port cannot be had."""
        config = self._config
        place = authority(config.host, config.port)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        relay_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(grpc_health(self._ailment), server)
        try:
            port = server.add_insecure_port(place)
        except RuntimeError as error:
            raise ConfigError(
                f"port: cannot listen on {place}: the address is in use or not this machine's"
            ) from error
        await server.start()
        return server, port

    async def _registered(
        self,
        machinery: Machinery,
        servicer: WorkerServicer,
        transfer: Address,
        describe: Describe,
    ) -> None:
        """Hold the lease until a signal. Everything listens before anyone can learn of it."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)

        def on_lapsed() -> WorkerRecord:
            renewal = self._renew(machinery, servicer, describe)
            return asyncio.run_coroutine_threadsafe(renewal, loop).result()

        record = describe(self._incarnation, transfer)

        presence = self._presence = Presence(
            self._config.redis_url,
            Keys(self._config.cluster),
            Subject(
                record,
                on_lapsed,
                lambda: self._session is not None and self._session.check_health(),
                self._load,
                turns=self._turns,
                on_registered=lambda: loop.call_soon_threadsafe(self._publish_blocks),
            ),
            self._clock,
        )
        gc.freeze()
        gc.enable()
        presence.start()
        announce_ready(
            {
                "address": record.grpc_address,
                "metrics": record.metrics_address,
                "kernels": record.fingerprint["numerics"],
                "relay": machinery.transport.describe(),
                "blocks": machinery.blocks,
            }
        )
        await self._drain.begun()
        left = await self._drain.wait(lambda: self._session.node.legs if self._session else 0)
        log.info("stopping%s", f": {left} requests are cut off" if left else "")
        await asyncio.to_thread(presence.stop)

    async def _renew(
        self, machinery: Machinery, servicer: WorkerServicer, describe: Describe
    ) -> WorkerRecord:
        """Go on as a newborn that has the weights already.

        The transport starts over too: half of what was on its way when the process stood still was
        given up at the other end, and would lie in the way of what comes next.
        """
        log.warning("others gave this worker up while it stood still: it begins anew")
        assert self._session is not None
        await self._session.close()
        try:
            transfer = await machinery.transport.start_over()
        except KvrelayError as error:
            log.error("%s: this process ends", error)
            self._end_with(1)
            raise
        self._incarnation = Incarnation(secrets.token_hex(16))
        self._session = Session(self._incarnation, machinery)
        servicer.serve(self._session.node)
        gc.collect()  # of the last session everything refers to everything
        return describe(self._incarnation, transfer)

    def _end_with(self, status: int) -> None:
        self._status = status
        self._drain.hurry()

    def _on_signal(self) -> None:
        """The first one drains, the next one ends; an echo of the first is neither."""
        now_ns = self._clock.now_ns()
        if self._drain.remaining_ms is None:
            self._asked_ns = now_ns
            self._begin_drain(None)
        elif now_ns - self._asked_ns > SAME_SIGNAL_NS:
            self._drain.hurry()

    def _begin_drain(self, budget_s: float | None) -> None:
        if self._drain.begin(budget_s) and self._session is not None:
            node = self._session.node
            log.info("draining: %d requests, %d ms", node.legs, self._drain.remaining_ms)
            node.announce_drain()

    def _traceparent(self, leg: str) -> str:
        return self._session.node.traceparent(leg) if self._session is not None else ""

    def _publish_blocks(self) -> None:
        assert self._session is not None
        self._session.publisher.registered()

    def _load(self) -> LoadRecord:
        assert self._session is not None
        return self._session.load()

    def _turns(self) -> ctypes.c_int64:
        assert self._session is not None
        return self._session.loop.turns

    def _gauges(self) -> WorkerGauges:
        return self._session.gauges() if self._session is not None else NOTHING_YET

    def _ailment(self, able: bool) -> str:
        """Why this worker is not alive, or (`able`) cannot be given work now; empty if neither."""
        if self._session is None:
            return "starting"
        if not self._session.node.serving:
            return "the engine makes no progress"
        if able and self._drain.remaining_ms is not None:
            return "it drains"
        if able and (self._presence is None or not self._presence.registered):
            return "Redis does not hold its lease"
        return ""

    def _info(self) -> dict[str, str]:
        config = self._config
        return {
            "role": config.role,
            "name": self._name,
            "model": config.model,
            "dtype": config.dtype,
            "version": __version__,
        }


def computing(facts: Facts, config: WorkerConfig) -> Compute:
    """The model, loaded. Heavy imports only now: a setting that cannot work is told at once."""
    from kvrelay.shared.worker.compute import ComputeSettings, load_compute

    settings = ComputeSettings(config.kernels, config.compute_threads, facts.tokenizer.vocab_size)
    return load_compute(facts.source, facts.model, facts.capacity, settings)
