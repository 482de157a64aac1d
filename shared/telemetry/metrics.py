"""Every metric, once. Label values are closed sets, so that no client can grow them.

A registry belongs to the object that made it. Counters and histograms grow by the methods below;
gauges are read from the living state at each scrape, so that none can be left behind (stuck).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvrelay.shared.telemetry.labels import (
    AttemptCause,
    CacheResult,
    Direction,
    Endpoint,
    LedgerResult,
    LegEnd,
    Outcome,
    RouteKind,
    TokenKind,
    TransferFault,
    UsageKind,
    WorkerState,
)
from kvrelay.shared.telemetry.timeline import Timeline
from kvrelay.shared.types import Role

TTFT_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
TPOT_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
DURATION_BUCKETS_S: Final = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
STEP_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.2, 0.3, 0.5, 1.0, 2.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS: Final = tuple(2**power for power in range(15))
RELAY_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0,
)  # fmt: skip
FREE_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0,
)  # fmt: skip
RATIO_BUCKETS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)


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


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The Prometheus text of `registry` and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class RouterMetrics:
    """What a router counts. Methods may be called from any thread."""

    def __init__(self, gauges: Callable[[], RouterGauges]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Gauges(lambda: _router_families(gauges())))
        self._requests = _counter(
            registry,
            "requests",
            "Requests by endpoint and end.",
            endpoint=Endpoint,
            outcome=Outcome,
        )
        self._tokens = _counter(
            registry, "request_tokens", "Tokens of ended requests, as in usage.", kind=UsageKind
        )
        self._attempts = _counter(
            registry, "attempts", "Attempts at legs by what caused them.", cause=AttemptCause
        )
        self._ttft = _histogram(
            registry, "time_to_first_token_seconds", "From request to first token.", TTFT_BUCKETS_S
        )
        self._tpot = _histogram(
            registry,
            "time_per_output_token_seconds",
            "Mean time per token after the first, by request.",
            TPOT_BUCKETS_S,
        )
        self._duration = _histogram(
            registry, "request_duration_seconds", "From request to its end.", DURATION_BUCKETS_S
        )

        self._routes = _counter(
            registry, "routes", "Attempts at legs by how they are served.", route=RouteKind
        )
        name = "first_token_outcome_ratio"
        text = "Time to the first token by its prediction when the route was chosen."
        self._outcome_ratio = Histogram(
            f"kvrelay_{name}", text, ["route"], registry=registry, buckets=RATIO_BUCKETS
        )
        for kind in RouteKind:
            self._outcome_ratio.labels(kind)
        self._free = Histogram(
            "kvrelay_time_to_free_seconds",
            "From a leg's end until its last worker said that it holds nothing of it.",
            ["end"],
            registry=registry,
            buckets=FREE_BUCKETS_S,
        )
        for end in LegEnd:
            self._free.labels(end)

    def freed(self, end: LegEnd, seconds: float) -> None:
        """The last worker has let go of a leg that is over."""
        self._free.labels(end).observe(seconds)

    def routed(self, kind: RouteKind) -> None:
        self._routes.labels(kind).inc()

    def predicted(self, kind: RouteKind, predicted_s: float, took_s: float) -> None:
        """The first token of a leg whose route was chosen by measured rates."""
        self._outcome_ratio.labels(kind).observe(took_s / predicted_s)

    def request_refused(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """A request that ended before it became a `ValidRequest`."""
        self._requests.labels(endpoint, outcome).inc()

    def request_ended(
        self,
        endpoint: Endpoint,
        outcome: Outcome,
        timeline: Timeline,
        tokens: Mapping[UsageKind, int],
    ) -> None:
        """Once per accepted request; the times come from the router's timeline of it."""
        self._requests.labels(endpoint, outcome).inc()
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)
        _observe(self._ttft, timeline.ttft_s)
        _observe(self._tpot, timeline.tpot_s(tokens.get(UsageKind.COMPLETION, 0)))
        _observe(self._duration, timeline.duration_s)

    def attempt_begun(self, cause: AttemptCause) -> None:
        self._attempts.labels(cause).inc()


class WorkerMetrics:
    """What a worker counts. Methods may be called from any thread."""

    def __init__(self, gauges: Callable[[], WorkerGauges], info: Mapping[str, str]) -> None:
        """`info` becomes the labels of `kvrelay_info`: role, model, version and the like."""
        self.registry = registry = CollectorRegistry()
        registry.register(_Gauges(lambda: _worker_families(gauges())))
        Info("kvrelay", "What this worker is.", registry=registry).info(dict(info))
        self._steps = _histogram(registry, "step_seconds", "Engine steps.", STEP_BUCKETS_S)
        self._step_tokens = _histogram(
            registry, "step_tokens", "Tokens computed per engine step.", STEP_TOKENS_BUCKETS
        )
        self._step_count = Counter("kvrelay_steps", "Engine steps.", registry=registry)
        computed = _counter(registry, "computed_tokens", "Tokens computed by kind.", kind=TokenKind)
        self._computed_prompt = computed.labels(TokenKind.PROMPT)
        self._computed_output = computed.labels(TokenKind.OUTPUT)
        self._preemptions = Counter(
            "kvrelay_preemptions", "Requests put back for want of blocks.", registry=registry
        )
        self._relay_bytes = _counter(
            registry, "relay_bytes", "KV bytes relayed.", direction=Direction
        )
        self._relay_blocks = _counter(
            registry, "relay_blocks", "KV blocks relayed.", direction=Direction
        )
        self._relay_chunks = _counter(
            registry, "relay_chunks", "Chunks relayed.", direction=Direction
        )
        self._relay = _histogram(
            registry, "relay_seconds", "Relay of one chunk, begin to end.", RELAY_BUCKETS_S
        )
        self._faults = _counter(
            registry, "transfer_faults", "Faults of the relay.", kind=TransferFault
        )
        self._cache = _counter(
            registry, "prefix_cache_tokens", "Prompt tokens looked up.", result=CacheResult
        )

    def step_ended(self, seconds: float, prompt_tokens: int, output_tokens: int) -> None:
        """One engine step that computed that many tokens of prompts and of answers."""
        self._step_count.inc()
        self._steps.observe(seconds)
        self._step_tokens.observe(prompt_tokens + output_tokens)
        self._computed_prompt.inc(prompt_tokens)
        self._computed_output.inc(output_tokens)

    def preempted(self) -> None:
        self._preemptions.inc()

    def chunk_relayed(
        self, direction: Direction, blocks: int, chunk_bytes: int, seconds: float
    ) -> None:
        self._relay_chunks.labels(direction).inc()
        self._relay_blocks.labels(direction).inc(blocks)
        self._relay_bytes.labels(direction).inc(chunk_bytes)
        self._relay.observe(seconds)

    def transfer_failed(self, kind: TransferFault) -> None:
        self._faults.labels(kind).inc()

    def prefix_looked_up(self, hit_tokens: int, miss_tokens: int) -> None:
        self._cache.labels(CacheResult.HIT).inc(hit_tokens)
        self._cache.labels(CacheResult.MISS).inc(miss_tokens)


class _Gauges(Collector):
    """Families that are made anew at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read a state that may not exist yet."""
        return []


def _router_families(now: RouterGauges) -> Iterator[Metric]:
    in_flight = "kvrelay_requests_in_flight"
    yield GaugeMetricFamily(in_flight, "Accepted, not ended.", now.requests_in_flight)
    workers = GaugeMetricFamily("kvrelay_workers", "Workers seen.", labels=["role", "state"])
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


def _worker_families(now: WorkerGauges) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("kvrelay_pool_blocks", "KV blocks by state.", labels=["state"])
    blocks.add_metric(["free"], now.free_blocks)
    blocks.add_metric(["cached_idle"], now.cached_idle_blocks)
    blocks.add_metric(["in_use"], now.in_use_blocks)
    blocks.add_metric(["quarantined"], now.quarantined_blocks)
    yield blocks
    for name, text, value in (
        ("pool_blocks_capacity", "KV blocks in all.", now.pool_blocks),
        ("requests_waiting", "Legs that wait for their first step.", now.requests_waiting),
        ("requests_running", "Legs that are computed.", now.requests_running),
        (
            "transfer_kept_bytes",
            "Of messages of the relay that nothing waits for yet.",
            now.transfer_kept_bytes,
        ),
    ):
        yield GaugeMetricFamily(f"kvrelay_{name}", text, value)


def _counter(registry: CollectorRegistry, name: str, text: str, **labels: type[StrEnum]) -> Counter:
    """A counter whose every series exists from the start, at 0."""
    counter = Counter(f"kvrelay_{name}", text, list(labels), registry=registry)
    for values in product(*labels.values()):
        counter.labels(*values)
    return counter


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(f"kvrelay_{name}", text, registry=registry, buckets=buckets)


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
