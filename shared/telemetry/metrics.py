"""Every metric, once. Label values are closed sets, so that no client can grow them.

A registry belongs to the object that made it. Counters and histograms grow by the methods below;
gauges are read from the living state at each scrape, so that none can be left behind (stuck).
What each one says, and what to do about it, is in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrelay.shared.telemetry.buckets import (
    COUNT_BUCKETS,
    DURATION_BUCKETS_S,
    RATIO_BUCKETS,
    STAGE_BUCKETS_S,
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
    router_families,
)
from kvrelay.shared.telemetry.labels import (
    AttemptCause,
    Endpoint,
    LegEnd,
    Outcome,
    RouteKind,
    RouteReason,
    StageKind,
    UsageKind,
)
from kvrelay.shared.telemetry.timeline import Timeline
from kvrelay.shared.telemetry.worker_metrics import WorkerMetrics

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
            STAGE_BUCKETS_S,
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
        def stage(name: str, kind: StageKind, text: str) -> Alias:
            return Alias(f"request_{name}_time_seconds", self._stages, {"stage": kind}, text=text)

        return (
            Alias("time_to_first_token_seconds", self._ttft),
            Alias("inter_token_latency_seconds", self._gaps),
            Alias("request_time_per_output_token_seconds", self._tpot),
            Alias("e2e_request_latency_seconds", self._duration),
            stage("queue", StageKind.QUEUED, "Time of legs in a worker's queue."),
            stage("prefill", StageKind.PREFILLING, "Time in which prompts were computed."),
            stage("decode", StageKind.DECODING, "Time in which answers were computed."),
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


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
