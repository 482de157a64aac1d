"""The router's composition root: the only place of this service that constructs and that starts."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import secrets
import signal
from dataclasses import dataclass, replace
from functools import partial

import uvloop

from kvrelay.services.router import policy
from kvrelay.services.router.admin import legs_page
from kvrelay.services.router.admission import Admission
from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.router.dashboard.gather import Gathering
from kvrelay.services.router.dashboard.routes import Shown, dashboard_routes
from kvrelay.services.router.dispatch import Deadlines, Dispatcher
from kvrelay.services.router.edge import (
    Administration,
    Served,
    edge_settings,
    open_ports,
    servers,
)
from kvrelay.services.router.faulty import FaultyRoster
from kvrelay.services.router.holdings import BlockDirectory
from kvrelay.services.router.links import keep_library
from kvrelay.services.router.membership import Membership
from kvrelay.services.router.observe import Observer
from kvrelay.services.router.placement import Placement
from kvrelay.services.router.refusals import RefusalCounter
from kvrelay.services.router.structured_pool import Grammars
from kvrelay.services.router.sweeper import Sweeper
from kvrelay.services.router.tools.model import Parsers
from kvrelay.services.router.validate import ModelCard, model_card
from kvrelay.shared.chaos.decide import Chaos, open_chaos
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.lifeline import announce_ready
from kvrelay.shared.ports import authority
from kvrelay.shared.store.blocks import BlockReader
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.ledger import Ledger
from kvrelay.shared.store.open_records import OpenRecords
from kvrelay.shared.store.presence import Presence, Subject
from kvrelay.shared.store.records import RouterRecord
from kvrelay.shared.telemetry import log as logs
from kvrelay.shared.telemetry.chaos import count_chaos
from kvrelay.shared.telemetry.labels import LedgerResult, WorkerState
from kvrelay.shared.telemetry.metrics import RouterGauges, RouterMetrics, render
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.types import Incarnation, Role

log = logging.getLogger(__name__)

FIRST_VIEW_S = 2.0
"""A worker that is registered and does not answer delays a router's start by no more."""


def run(config: RouterConfig) -> int:
    """Serve until a signal; the exit status. Raises `KvrelayError` when it cannot start."""
    return uvloop.run(serve(config))


@dataclass(slots=True)
class CardSource:
    """The model as the edge sees it; the context is what every worker in use can hold."""

    card: ModelCard
    membership: Membership

    def __call__(self) -> ModelCard:
        found = policy.candidates(self.membership.live(), frozenset())
        used = (*found.prefills, *found.decodes, *found.alone)
        lengths = [worker.record.max_model_len for worker in used]
        shortest = min(lengths, default=self.card.max_model_len)
        if shortest != self.card.max_model_len:
            self.card = replace(self.card, max_model_len=shortest)
        return self.card


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs beside the HTTP server."""

    dispatcher: Dispatcher
    membership: Membership
    store: ClusterStore
    directory: BlockDirectory
    ledger: Ledger
    open_records: OpenRecords
    sweeper: Sweeper
    presence: Presence
    tracing: Tracing
    grammars: Grammars


def read_card(config: RouterConfig, created_s: int) -> ModelCard:
    """Raises `ModelError`, which names the file."""
    source = resolve_model(config.model)
    tokenizer = load_tokenizer(source.path)
    model = read_config(source)
    card = model_card(
        config.served_names,
        tokenizer,
        model.max_positions,
        created_s,
        vocab=model.vocab,
        parsers=Parsers(config.tool_call_parser, config.reasoning_parser),
    )
    return replace(card, max_output_tokens=config.max_output_tokens)


async def serve(config: RouterConfig) -> int:
    incarnation = Incarnation(secrets.token_hex(16))
    clock = SystemClock()
    speaker = logs.Speaker("router", "router", lambda: incarnation, lambda leg: traceparent(leg))
    logs.configure(speaker, config.log_level, config.log_format)
    chaos = open_chaos(config.chaos, "router", "router")
    api_keys = ApiKeys(config.api_key, config.api_key_file)
    ports = open_ports(config)

    card = await asyncio.to_thread(read_card, config, clock.wall_ns() // 10**9)

    keys = Keys(config.cluster)
    store = ClusterStore(config.redis_url, keys)
    ledger = Ledger(config.redis_url, keys, incarnation)
    tracing = Tracing.from_environment("kvrelay-router", incarnation, os.environ, clock)
    metrics = RouterMetrics(
        lambda: gauges(observer, membership, ledger, sweeper, admission.waiting),
        vllm_model=config.served_names[0] if config.vllm_metric_names else "",
    )
    observer = Observer(metrics, tracing, ledger, clock)
    admission = Admission(config.max_queue_requests, config.queue_s, clock)
    directory = BlockDirectory(BlockReader(config.redis_url, keys))
    placement = Placement(store, directory, clock, incarnation, config.route)
    dispatcher = Dispatcher(placement, admission, observer, deadlines_of(config))
    traceparent = dispatcher.traceparent
    membership = Membership(
        store, incarnation, card.tokenizer.identity, dispatcher.on_event, dispatcher.on_lost
    )
    membership.prepare = directory.follow
    placement.setup_s = membership.meetings.setup_s
    dispatcher.join(roster_of(membership, chaos, metrics))
    membership.busy = lambda: observer.in_flight > 0
    open_records = OpenRecords(config.redis_url, keys)
    sweeper = Sweeper(open_records, incarnation, membership.addresses, clock)
    keep_library()
    token = secrets.token_urlsafe(32)
    record = RouterRecord(incarnation, "router", ports.address, token)
    subject = told_to(membership, sweeper, ledger, router_subject(record))
    presence = Presence(config.redis_url, keys, subject, clock)

    stopping = asyncio.Event()
    at = (card.names[0], ports.clients.getsockname()[1])
    gathering = Gathering(*at, dispatcher, membership, observer, admission)
    administration = administration_of(gathering, incarnation, token, stopping)
    settings = edge_settings(config, api_keys)
    source, refusals = CardSource(card, membership), RefusalCounter(metrics)
    served = servers(settings, ports, administration, dispatcher, source, refusals)
    parts = Parts(
        *(dispatcher, membership, store, directory, ledger, open_records, sweeper),
        *(presence, tracing, settings.grammars),
    )
    if config.api_key_file:
        reread_on_sighup(api_keys)
    await run_until_signal(served, stopping, parts, config.drain_s)
    return 0


def administration_of(
    parts: Gathering, incarnation: Incarnation, token: str, stopping: asyncio.Event
) -> Administration:
    """What is served to people and probes: read when it is asked for."""
    dispatcher, observer, admission = parts.dispatcher, parts.observer, parts.admission
    return Administration(
        metrics=lambda: render(observer.metrics.registry)[0],
        queued=lambda: admission.waiting,
        legs=lambda: legs_page(
            incarnation, dispatcher.legs(), observer.in_flight, admission.waiting
        ),
        drain=stopping.set,
        token=token,
        dashboard=dashboard_routes(Shown(parts, observer.flight, observer.clock.now_ns)),
    )


def told_to(membership: Membership, sweeper: Sweeper, ledger: Ledger, subject: Subject) -> Subject:
    """`subject`, whose news reach these on the event loop."""
    loop = asyncio.get_running_loop()

    def somebody_came_or_went() -> None:
        membership.look()
        sweeper.look()

    return replace(
        subject,
        on_change=lambda: loop.call_soon_threadsafe(somebody_came_or_went),
        on_registered=lambda: loop.call_soon_threadsafe(ledger.registered),
    )


def deadlines_of(config: RouterConfig) -> Deadlines:
    return Deadlines(
        config.queue_s, config.queue_s, config.prefill_s, config.transfer_s, config.idle_s
    )


def roster_of(
    membership: Membership, chaos: Chaos | None, metrics: RouterMetrics
) -> Membership | FaultyRoster:
    if chaos is None:
        return membership
    chaos.injected = count_chaos(metrics.registry)
    return FaultyRoster(membership, chaos)


def reread_on_sighup(keys: ApiKeys) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, partial(loop.run_in_executor, None, keys.reload))


async def run_until_signal(
    served: Served,
    stopping: asyncio.Event,
    parts: Parts,
    drain_s: float,
) -> None:
    """Serve, clients first; when `stopping` is set, or on the first SIGTERM or SIGINT, refuse new
    work and drain; on the next signal stop."""
    forced = asyncio.Event()

    def on_signal() -> None:
        (forced if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    parts.presence.start()
    background = [
        asyncio.create_task(parts.membership.run()),
        asyncio.create_task(parts.directory.run()),
        asyncio.create_task(parts.ledger.run()),
        asyncio.create_task(parts.sweeper.run()),
    ]
    # Who connects meanwhile waits in the listener's queue: the first answer knows the workers.
    await first_of(parts.membership.first_view(), stopping.wait(), asyncio.sleep(FIRST_VIEW_S))
    serving = [asyncio.create_task(server.serve([listener])) for server, listener in served]
    address = authority(*served[0][1].getsockname()[:2])
    gc.collect()
    gc.freeze()  # what a router is made of never ends: no collection need look at it
    detail = {"address": address, "url": f"http://{address}/v1"}
    if len(served) > 1:
        detail["admin"] = authority(*served[1][1].getsockname()[:2])
        log.info("metrics and administration on http://%s", detail["admin"])
    announce_ready(detail)
    log.info("listening on http://%s", address)
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait((*serving, signalled, *background), return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    await first_of(parts.dispatcher.drain(drain_s), forced.wait())
    for server, _ in served:
        server.stop()
    await first_of(asyncio.wait(serving), forced.wait())
    for task in (*background, signalled, *serving):
        task.cancel()
    results = await asyncio.gather(*serving, *background, return_exceptions=True)
    await asyncio.to_thread(parts.presence.stop)
    parts.grammars.close()
    await parts.ledger.close()
    await parts.open_records.aclose()
    await parts.directory.close()
    await parts.store.close()
    parts.tracing.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def first_of(*waits: object) -> None:
    """Until one of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def router_subject(record: RouterRecord) -> Subject:
    """A router is one incarnation as long as its process lives, also when its lease had ended.

    A worker that others gave up begins anew because they may have given its memory away. A router
    has nothing that anybody could write to: what it started on workers ended with its streams and
    goes on as new attempts with nonces of their own, and what was swept of its ledger it opens
    again with its next event. So whatever bears its name (lease, ledger, assignments, streams) is
    true after a freeze as it was before, without a moment in which the two are mixed.
    """
    still = ctypes.c_int64(0)  # it says the same at all times
    return Subject(record, lambda: record, turns=lambda: still)


def gauges(
    observer: Observer, membership: Membership, ledger: Ledger, sweeper: Sweeper, waiting: int
) -> RouterGauges:
    live = {worker.incarnation for worker in membership.live()}
    workers: dict[tuple[Role, WorkerState], int] = {}
    for record in membership.known():
        state = WorkerState.READY if record.incarnation in live else WorkerState.LOST
        workers[record.role, state] = workers.get((record.role, state), 0) + 1
    counts = ledger.counts
    events = {
        LedgerResult.WRITTEN: counts.written,
        LedgerResult.CONFLICT: counts.refused,
        LedgerResult.DROPPED: counts.dropped,
    }
    return RouterGauges(observer.in_flight, workers, events, sweeper.swept, waiting)
