"""What a worker counts: its engine's steps, its relay, and how long prompts take here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector

from kvrelay.shared.telemetry.buckets import (
    RELAY_BUCKETS_S,
    STAGE_BUCKETS_S,
    STEP_BUCKETS_S,
    STEP_TOKENS_BUCKETS,
)
from kvrelay.shared.telemetry.families import Alias, Living, VllmNames, counter, histogram
from kvrelay.shared.telemetry.gauges import WorkerGauges, gauge_aliases, worker_families
from kvrelay.shared.telemetry.labels import CacheResult, Direction, TokenKind, TransferFault


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
