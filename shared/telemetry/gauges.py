"""The state of a router and of a worker at a scrape, and how a page shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.shared.telemetry.families import VLLM, Alias, Living
from kvrelay.shared.telemetry.labels import LedgerResult, WorkerState
from kvrelay.shared.types import Role


@dataclass(frozen=True, slots=True)
class RouterGauges:
    """A router's state at one scrape."""

    requests_in_flight: int
    workers: Mapping[tuple[Role, WorkerState], int]
    """Pairs left out count as 0."""
    ledger_events: Mapping[LedgerResult, int] = field(default_factory=dict)
    """These only grow; those left out count as 0."""
    ledger_swept: int = 0
    """This one, too."""
    legs_waiting: int = 0


@dataclass(frozen=True, slots=True)
class WorkerGauges:
    """A worker's state at one scrape; the four kinds of blocks add up to `pool_blocks`."""

    pool_blocks: int
    free_blocks: int
    cached_idle_blocks: int
    in_use_blocks: int
    quarantined_blocks: int
    requests_waiting: int
    requests_running: int
    transfer_kept_bytes: int = 0
    block_bytes: int = 0


def router_families(now: RouterGauges) -> Iterator[Metric]:
    for name, text, value in (
        ("requests_in_flight", "Requests accepted and not ended.", now.requests_in_flight),
        ("legs_waiting", "Choices that wait for their first token.", now.legs_waiting),
    ):
        yield GaugeMetricFamily(f"kvrelay_{name}", text, value)
    text = "Workers seen, by role and whether they can be given work."
    workers = GaugeMetricFamily("kvrelay_workers", text, labels=["role", "state"])
    for role in Role:
        for state in WorkerState:
            workers.add_metric([role, state], now.workers.get((role, state), 0))
    yield workers
    events = CounterMetricFamily(
        "kvrelay_ledger_events", "Events for the ledger, by what became of them.", labels=["result"]
    )
    for result in LedgerResult:
        events.add_metric([result], now.ledger_events.get(result, 0))
    yield events
    swept = "Records of routers that are gone, closed by this one."
    yield CounterMetricFamily("kvrelay_ledger_swept", swept, now.ledger_swept)


def worker_families(now: WorkerGauges) -> Iterator[Metric]:
    text = "KV blocks by state; the four add up to kvrelay_pool_blocks_capacity."
    blocks = GaugeMetricFamily("kvrelay_pool_blocks", text, labels=["state"])
    blocks.add_metric(["free"], now.free_blocks)
    blocks.add_metric(["cached_idle"], now.cached_idle_blocks)
    blocks.add_metric(["in_use"], now.in_use_blocks)
    blocks.add_metric(["quarantined"], now.quarantined_blocks)
    yield blocks
    kept = "Of messages of the relay that nothing waits for yet."
    for name, text, value in (
        ("pool_blocks_capacity", "KV blocks in all.", now.pool_blocks),
        ("pool_capacity_bytes", "Memory of all KV blocks.", now.pool_blocks * now.block_bytes),
        ("requests_waiting", "Legs that wait for their first step.", now.requests_waiting),
        ("requests_running", "Legs that are computed.", now.requests_running),
        ("transfer_kept_bytes", kept, now.transfer_kept_bytes),
    ):
        yield GaugeMetricFamily(f"kvrelay_{name}", text, value)


def gauge_aliases(gauges: Callable[[], WorkerGauges]) -> tuple[Alias, ...]:
    def one(name: str, text: str, value: Callable[[WorkerGauges], float]) -> Alias:
        family = f"{VLLM}{name}"
        return Alias(name, Living(lambda: iter([GaugeMetricFamily(family, text, value(gauges()))])))

    return (
        one("num_requests_running", "Legs that are computed.", lambda now: now.requests_running),
        one(
            "num_requests_waiting",
            "Legs that wait for their first step.",
            lambda now: now.requests_waiting,
        ),
        one(
            "kv_cache_usage_perc",
            "Share of the KV blocks that requests hold, from 0 to 1.",
            lambda now: (now.in_use_blocks + now.quarantined_blocks) / max(now.pool_blocks, 1),
        ),
    )
