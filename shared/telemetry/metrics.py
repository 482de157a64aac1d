"""Every metric, once. Label values are closed sets, so that no client can grow them.

A registry belongs to the object that made it. Counters and histograms grow by the methods below;
gauges are read from the living state at each scrape, so that none can be left behind (stuck).
What each one says, and what to do about it, is in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrelay.shared.telemetry.buckets import (
    COUNT_BUCKETS,
    DURATION_BUCKETS_S,
    FREE_BUCKETS_S,
    RATIO_BUCKETS,
    RELAY_BUCKETS_S,
    STAGE_BUCKETS_S,
    STEP_BUCKETS_S,
    STEP_TOKENS_BUCKETS,
    TPOT_BUCKETS_S,
    TTFT_BUCKETS_S,
)
from kvrelay.shared.telemetry.families import (
    Alias,
    Living,
    TokenHistogram,
    VllmNames,
    counter,
    histogram,
)
from kvrelay.shared.telemetry.gauges import (
    RouterGauges,
    WorkerGauges,
    gauge_aliases,
    router_families,
    worker_families,
)
from kvrelay.shared.telemetry.labels import (
    AttemptCause,
    CacheResult,
    Direction,
    Endpoint,
    LegEnd,
    Outcome,
    RouteKind,
    RouteReason,
    StageKind,
    TokenKind,
    TransferFault,
    UsageKind,
)
from kvrelay.shared.telemetry.timeline import Timeline

__all__ = ["RouterGauges", "RouterMetrics", "WorkerGauges", "WorkerMetrics", "render"]


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The Prometheus text of `registry` and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class RouterMetrics:
    """What a router counts. Methods may be called from any thread, `token_gap` from one."""

    def __init__(self, gauges: Callable[[], RouterGauges], vllm_model: str = "") -> None:
        """`vllm_model`: the model as vLLM's metric names tell it; empty leaves these names out."""
        self.registry = registry = CollectorRegistry()
        registry.register(Living(lambda: router_families(gauges())))
        ProcessCollector(registry=registry)
        self._count_requests(registry)
        self._time_requests(registry)
        self._count_routes(registry)
        if vllm_model:
            registry.register(VllmNames(vllm_model, self._aliases()))

    def _count_requests(self, registry: CollectorRegistry) -> None:
        self._requests = counter(
            registry,
            "requests",
            "Requests that are over, by endpoint and end; those refused at the door as well.",
            endpoint=Endpoint,
            outcome=Outcome,
        )
        self._accepted = counter(
            registry,
            "requests_accepted",
            "Requests that became work: each is in flight, or in kvrelay_requests_total once.",
            endpoint=Endpoint,
        )
        self._refused = counter(
            registry,
            "requests_refused",
            "Requests answered with an error before any worker had to do with them.",
            endpoint=Endpoint,
        )
        self._tokens = counter(
            registry,
            "request_tokens",
            "Tokens of ended requests as their usage tells them; cached are a part of prompt.",
            kind=UsageKind,
        )
        self._attempts = counter(
            registry,
            "attempts",
            "Attempts at legs by what caused them: all but first continue what something broke.",
            cause=AttemptCause,
        )

    def _time_requests(self, registry: CollectorRegistry) -> None:
        self._ttft = histogram(
            registry,
            "time_to_first_token_seconds",
            "From the request's arrival at the router until its first token is on its way out.",
            TTFT_BUCKETS_S,
        )
        self._gaps = TokenHistogram(
            registry,
            "inter_token_latency_seconds",
            "Between two tokens of one choice as the router gets them: what a reader sees stutter.",
            TPOT_BUCKETS_S,
        )
        self._tpot = histogram(
            registry,
            "time_per_output_token_seconds",
            "Mean time per token after the first, once for each request.",
            TPOT_BUCKETS_S,
        )
        self._duration = histogram(
            registry,
            "request_duration_seconds",
            "From the request's arrival until its end, whatever the end.",
            DURATION_BUCKETS_S,
        )
        self._stages = histogram(
            registry,
            "stage_seconds",
            "Time of legs in each stage, by the router; handing_off is the exposed transfer.",
            STAGE_BUCKETS_S,
            stage=StageKind,
        )
        self._free = histogram(
            registry,
            "time_to_free_seconds",
            "From a leg's end until its last worker said that it holds nothing of it.",
            FREE_BUCKETS_S,
            end=LegEnd,
        )
        self._prompt_sizes = histogram(
            registry, "request_prompt_tokens", "Prompt tokens of each request.", COUNT_BUCKETS
        )
        self._answer_sizes = histogram(
            registry,
            "request_generation_tokens",
            "Tokens of each request's answer, over all of its choices.",
            COUNT_BUCKETS,
        )

    def _count_routes(self, registry: CollectorRegistry) -> None:
        self._routes = counter(
            registry, "routes", "Attempts at legs by how they are served.", route=RouteKind
        )
        self._reasons = counter(
            registry,
            "route_decisions",
            "The same attempts by what decided the choice of workers.",
            route=RouteKind,
            reason=RouteReason,
        )
        self._outcome_ratio = histogram(
            registry,
            "first_token_outcome_ratio",
            "Time to the first token by what was predicted with the route: 1 is as foretold.",
            RATIO_BUCKETS,
            route=RouteKind,
        )
        self._off = histogram(
            registry,
            "first_token_prediction_error_seconds",
            "How far, either way, the first token was from where the route's choice expected it.",
            STAGE_BUCKETS_S,
            route=RouteKind,
        )

    def _aliases(self) -> tuple[Alias, ...]:
        return (
            Alias("time_to_first_token_seconds", self._ttft),
            Alias("inter_token_latency_seconds", self._gaps),
            Alias("request_time_per_output_token_seconds", self._tpot),
            Alias("e2e_request_latency_seconds", self._duration),
            Alias("request_queue_time_seconds", self._stages, {"stage": StageKind.QUEUED}),
            Alias("request_prefill_time_seconds", self._stages, {"stage": StageKind.PREFILLING}),
            Alias("request_decode_time_seconds", self._stages, {"stage": StageKind.DECODING}),
            Alias("request_prompt_tokens", self._prompt_sizes),
            Alias("request_generation_tokens", self._answer_sizes),
            Alias("prompt_tokens", self._tokens, {"kind": UsageKind.PROMPT}),
            Alias("prompt_tokens_cached", self._tokens, {"kind": UsageKind.CACHED}),
            Alias("generation_tokens", self._tokens, {"kind": UsageKind.COMPLETION}),
        )

    def freed(self, end: LegEnd, seconds: float) -> None:
        """The last worker has let go of a leg that is over."""
        self._free.labels(end).observe(seconds)

    def routed(self, kind: RouteKind, reason: RouteReason) -> None:
        self._routes.labels(kind).inc()
        self._reasons.labels(kind, reason).inc()

    def predicted(self, kind: RouteKind, predicted_s: float, took_s: float) -> None:
        """The first token of a leg whose route was chosen by measured rates."""
        self._outcome_ratio.labels(kind).observe(took_s / predicted_s)
        self._off.labels(kind).observe(abs(took_s - predicted_s))

    def token_gap(self, seconds: float) -> None:
        self._gaps.observe(seconds)

    def stage_over(self, stage: StageKind, seconds: float) -> None:
        self._stages.labels(stage).observe(seconds)

    def request_refused(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """A request that ended before it became work."""
        self._refused.labels(endpoint).inc()
        self._requests.labels(endpoint, outcome).inc()

    def request_accepted(self, endpoint: Endpoint) -> None:
        """`request_ended` follows."""
        self._accepted.labels(endpoint).inc()

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
        self._prompt_sizes.observe(tokens.get(UsageKind.PROMPT, 0))
        self._answer_sizes.observe(tokens.get(UsageKind.COMPLETION, 0))
        _observe(self._ttft, timeline.ttft_s)
        _observe(self._tpot, timeline.tpot_s(tokens.get(UsageKind.COMPLETION, 0)))
        _observe(self._duration, timeline.duration_s)

    def attempt_begun(self, cause: AttemptCause) -> None:
        self._attempts.labels(cause).inc()


class WorkerMetrics:
    """What a worker counts. Methods may be called from any thread."""

    def __init__(
        self, gauges: Callable[[], WorkerGauges], info: Mapping[str, str], vllm_model: str = ""
    ) -> None:
        """`info` becomes the labels of `kvrelay_info`: role, model, version and the like.
        `vllm_model` as of a router."""
        self.registry = registry = CollectorRegistry()
        registry.register(Living(lambda: worker_families(gauges())))
        ProcessCollector(registry=registry)
        Info("kvrelay", "What this worker is.", registry=registry).info(dict(info))
        self._count_steps(registry)
        self._count_relay(registry)
        self._time_legs(registry)
        self._cache = counter(
            registry,
            "prefix_cache_tokens",
            "Prompt tokens looked up among the blocks held here: hit is what need not be computed.",
            result=CacheResult,
        )
        if vllm_model:
            registry.register(VllmNames(vllm_model, self._aliases(gauges)))

    def _count_steps(self, registry: CollectorRegistry) -> None:
        self._steps = histogram(
            registry, "step_seconds", "Engine steps, from plan to tokens.", STEP_BUCKETS_S
        )
        self._step_tokens = histogram(
            registry, "step_tokens", "Tokens computed per engine step.", STEP_TOKENS_BUCKETS
        )
        self._step_count = Counter(
            "kvrelay_steps",
            "Engine steps: standing still while requests run is an engine that is stuck.",
            registry=registry,
        )
        computed = counter(
            registry,
            "computed_tokens",
            "Tokens computed: of prompts (also once more after a loss), and of answers.",
            kind=TokenKind,
        )
        self._computed_prompt = computed.labels(TokenKind.PROMPT)
        self._computed_output = computed.labels(TokenKind.OUTPUT)
        self._preemptions = Counter(
            "kvrelay_preemptions", "Requests put back for want of blocks.", registry=registry
        )

    def _count_relay(self, registry: CollectorRegistry) -> None:
        self._relay_bytes = counter(
            registry, "relay_bytes", "KV bytes relayed between workers.", direction=Direction
        )
        self._relay_blocks = counter(
            registry, "relay_blocks", "KV blocks relayed between workers.", direction=Direction
        )
        self._relay_chunks = counter(
            registry, "relay_chunks", "Chunks relayed between workers.", direction=Direction
        )
        self._relay = histogram(
            registry, "relay_seconds", "Relay of one chunk, begin to end.", RELAY_BUCKETS_S
        )
        self._faults = counter(
            registry,
            "transfer_faults",
            "Faults of the relay; each costs its attempt at most a new beginning.",
            kind=TransferFault,
        )

    def _time_legs(self, registry: CollectorRegistry) -> None:
        self._queue = histogram(
            registry,
            "queue_seconds",
            "From a prompt's arrival here until its first chunk is planned, with room at decode.",
            STAGE_BUCKETS_S,
        )
        self._prefill = histogram(
            registry,
            "prefill_seconds",
            "From the first chunk's plan until the first token is known.",
            STAGE_BUCKETS_S,
        )
        self._exposed = histogram(
            registry,
            "exposed_transfer_seconds",
            "From the first token here until the last block has left: what no computing hid.",
            STAGE_BUCKETS_S,
        )

    def _aliases(self, gauges: Callable[[], WorkerGauges]) -> tuple[Alias, ...]:
        return (
            *gauge_aliases(gauges),
            Alias("prefix_cache_queries", self._cache, without=("result",)),
            Alias("prefix_cache_hits", self._cache, {"result": CacheResult.HIT}),
            Alias("num_preemptions", self._preemptions),
            Alias("iteration_tokens_total", self._step_tokens),
        )

    def queued(self, seconds: float) -> None:
        """A prompt waited so long for its first step."""
        self._queue.observe(seconds)

    def prompt_computed(self, seconds: float) -> None:
        self._prefill.observe(seconds)

    def transfer_exposed(self, seconds: float) -> None:
        self._exposed.observe(seconds)

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


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
