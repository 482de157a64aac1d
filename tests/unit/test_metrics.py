"""Metrics: exact names and values, complete from the start, gauges that cannot be stuck."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.telemetry.labels import (
    AttemptCause,
    Direction,
    Endpoint,
    LedgerResult,
    LegEnd,
    Outcome,
    RouteKind,
    RouteReason,
    StageKind,
    TransferFault,
    UsageKind,
    WorkerState,
)
from kvrelay.shared.telemetry.metrics import (
    RouterGauges,
    RouterMetrics,
    WorkerGauges,
    WorkerMetrics,
    render,
)
from kvrelay.shared.telemetry.scrape import serve_metrics
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.telemetry.tracing import Tracing
from kvrelay.shared.types import EndReason, LegRef, Role
from kvrelay.shared.worker.journal import LegJournal

TOKENS = {UsageKind.PROMPT: 7, UsageKind.CACHED: 5, UsageKind.COMPLETION: 11}
PROCESS = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}
IDLE = WorkerGauges(64, 60, 4, 0, 0, 0, 0)


@dataclass
class HandClock:
    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return self.ns


def router(gauges: RouterGauges | None = None) -> RouterMetrics:
    return RouterMetrics(lambda: gauges or RouterGauges(0, {}))


def worker() -> WorkerMetrics:
    return WorkerMetrics(lambda: IDLE, {"role": "prefill", "model": "tiny"})


def series(text: bytes) -> dict[str, float]:
    """`name{label="value",...}` -> value, without times of creation."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return {name: value for name, value in found.items() if "_created" not in name}


def families(metrics: RouterMetrics | WorkerMetrics) -> set[str]:
    text, _ = render(metrics.registry)
    names = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    names = {name for name in names if not name.endswith("_created")}
    assert {name for name in names if not name.startswith("kvrelay_")} == PROCESS
    return {name.removeprefix("kvrelay_") for name in names - PROCESS}


def test_a_router_has_exactly_these_metrics() -> None:
    assert families(router()) == {
        "attempts_total",
        "first_token_outcome_ratio",
        "first_token_prediction_error_seconds",
        "inter_token_latency_seconds",
        "ledger_events_total",
        "ledger_swept_total",
        "legs_waiting",
        "request_duration_seconds",
        "request_generation_tokens",
        "request_prompt_tokens",
        "request_tokens_total",
        "requests_accepted_total",
        "requests_in_flight",
        "requests_refused_total",
        "requests_total",
        "route_decisions_total",
        "routes_total",
        "stage_seconds",
        "time_per_output_token_seconds",
        "time_to_first_token_seconds",
        "time_to_free_seconds",
        "workers",
    }


def test_a_worker_has_exactly_these_metrics() -> None:
    assert families(worker()) == {
        "computed_tokens_total",
        "exposed_transfer_seconds",
        "info",
        "pool_blocks",
        "pool_blocks_capacity",
        "pool_capacity_bytes",
        "prefill_seconds",
        "preemptions_total",
        "prefix_cache_tokens_total",
        "queue_seconds",
        "relay_blocks_total",
        "relay_bytes_total",
        "relay_chunks_total",
        "relay_seconds",
        "requests_running",
        "requests_waiting",
        "step_seconds",
        "step_tokens",
        "steps_total",
        "transfer_faults_total",
        "transfer_kept_bytes",
    }


def test_every_series_is_there_from_the_start_at_zero() -> None:
    before = series(render(router().registry)[0])
    before = {name: value for name, value in before.items() if not name.startswith("process_")}
    assert set(before.values()) == {0.0}
    requests = [name for name in before if name.startswith("kvrelay_requests_total")]
    assert len(requests) == len(Endpoint) * len(Outcome)


def test_a_request_is_counted_with_the_times_of_its_timeline() -> None:
    metrics = router()
    timeline = Timeline()
    timeline.stamp(Moment.RECEIVED, 0)
    timeline.stamp(Moment.FIRST_TOKEN, 30_000_000)
    timeline.stamp(Moment.FINISHED, 130_000_000)
    metrics.attempt_begun(AttemptCause.FIRST)
    metrics.request_ended(Endpoint.CHAT, Outcome.OK, timeline, TOKENS)
    metrics.request_refused(Endpoint.COMPLETIONS, Outcome.BAD_REQUEST)
    metrics.request_accepted(Endpoint.CHAT)
    metrics.routed(RouteKind.LOCAL, RouteReason.HELD)
    metrics.stage_over(StageKind.QUEUED, 0.02)
    metrics.token_gap(0.004)
    metrics.token_gap(7.0)
    metrics.freed(LegEnd.CANCELLED, 0.25)
    metrics.predicted(RouteKind.LOCAL, predicted_s=0.2, took_s=0.25)
    now = series(render(metrics.registry)[0])
    assert now['kvrelay_requests_total{endpoint="chat",outcome="ok"}'] == 1
    assert now['kvrelay_requests_total{endpoint="completions",outcome="bad_request"}'] == 1
    assert now['kvrelay_request_tokens_total{kind="prompt"}'] == 7
    assert now['kvrelay_request_tokens_total{kind="cached"}'] == 5
    assert now['kvrelay_request_tokens_total{kind="completion"}'] == 11
    assert now['kvrelay_attempts_total{cause="first"}'] == 1
    assert now['kvrelay_routes_total{route="local"}'] == 1
    assert now['kvrelay_route_decisions_total{reason="held",route="local"}'] == 1
    assert now['kvrelay_requests_accepted_total{endpoint="chat"}'] == 1
    assert now['kvrelay_requests_refused_total{endpoint="completions"}'] == 1
    assert now['kvrelay_stage_seconds_sum{stage="queued"}'] == 0.02
    gaps = "kvrelay_inter_token_latency_seconds"
    assert (now[f"{gaps}_count"], now[f"{gaps}_sum"]) == (2, 7.004)
    assert now[f'{gaps}_bucket{{le="0.002"}}'] == 0
    assert now[f'{gaps}_bucket{{le="0.004"}}'] == 1  # a bound belongs to its bucket
    assert now[f'{gaps}_bucket{{le="2.5"}}'] == 1
    error = 'kvrelay_first_token_prediction_error_seconds_sum{route="local"}'
    assert now[error] == pytest.approx(0.05)
    assert now["kvrelay_request_prompt_tokens_sum"] == 7
    assert now["kvrelay_request_generation_tokens_sum"] == 11
    assert now['kvrelay_first_token_outcome_ratio_sum{route="local"}'] == 1.25
    assert now['kvrelay_time_to_free_seconds_sum{end="cancelled"}'] == 0.25
    assert now["kvrelay_time_to_first_token_seconds_sum"] == 0.03
    assert now['kvrelay_time_to_first_token_seconds_bucket{le="0.025"}'] == 0
    assert now['kvrelay_time_to_first_token_seconds_bucket{le="0.05"}'] == 1
    assert now["kvrelay_time_per_output_token_seconds_sum"] == 0.01
    assert now["kvrelay_request_duration_seconds_sum"] == 0.13


def test_a_request_that_ended_without_a_token_has_a_duration_only() -> None:
    metrics = router()
    timeline = Timeline()
    timeline.stamp(Moment.RECEIVED, 0)
    timeline.stamp(Moment.FINISHED, 500_000_000)
    metrics.request_ended(Endpoint.CHAT, Outcome.CANCELLED, timeline, {UsageKind.PROMPT: 7})
    now = series(render(metrics.registry)[0])
    assert now["kvrelay_time_to_first_token_seconds_count"] == 0
    assert now["kvrelay_time_per_output_token_seconds_count"] == 0
    assert now["kvrelay_request_duration_seconds_count"] == 1


def test_worker_counters_add_up() -> None:
    metrics = worker()
    metrics.step_ended(0.003, prompt_tokens=100, output_tokens=4)
    metrics.step_ended(0.003, prompt_tokens=0, output_tokens=5)
    metrics.preempted()
    metrics.chunk_relayed(Direction.SENT, blocks=8, chunk_bytes=4096, seconds=0.002)
    metrics.transfer_failed(TransferFault.CORRUPT)
    metrics.prefix_looked_up(hit_tokens=48, miss_tokens=3)
    metrics.queued(0.5)
    metrics.prompt_computed(0.25)
    metrics.transfer_exposed(0.125)
    now = series(render(metrics.registry)[0])
    assert now["kvrelay_steps_total"] == 2
    assert now["kvrelay_step_tokens_sum"] == 109
    assert now["kvrelay_step_seconds_sum"] == 0.006
    assert now['kvrelay_computed_tokens_total{kind="prompt"}'] == 100
    assert now['kvrelay_computed_tokens_total{kind="output"}'] == 9
    assert now["kvrelay_preemptions_total"] == 1
    assert now['kvrelay_relay_bytes_total{direction="sent"}'] == 4096
    assert now['kvrelay_relay_blocks_total{direction="sent"}'] == 8
    assert now['kvrelay_relay_chunks_total{direction="sent"}'] == 1
    assert now['kvrelay_relay_chunks_total{direction="received"}'] == 0
    assert now["kvrelay_relay_seconds_sum"] == 0.002
    assert now["kvrelay_queue_seconds_sum"] == 0.5
    assert now["kvrelay_prefill_seconds_sum"] == 0.25
    assert now["kvrelay_exposed_transfer_seconds_sum"] == 0.125
    assert now['kvrelay_transfer_faults_total{kind="corrupt"}'] == 1
    assert now['kvrelay_prefix_cache_tokens_total{result="hit"}'] == 48
    assert now['kvrelay_prefix_cache_tokens_total{result="miss"}'] == 3
    assert now['kvrelay_info{model="tiny",role="prefill"}'] == 1


def test_worker_gauges_are_what_the_worker_says_at_each_scrape() -> None:
    state = [replace(IDLE, in_use_blocks=60, free_blocks=0, requests_running=9)]
    metrics = WorkerMetrics(lambda: state[0], {})
    busy = series(render(metrics.registry)[0])
    state[0] = replace(
        IDLE, quarantined_blocks=1, requests_waiting=2, transfer_kept_bytes=9, block_bytes=100
    )
    later = series(render(metrics.registry)[0])
    assert busy['kvrelay_pool_blocks{state="in_use"}'] == 60
    assert busy["kvrelay_requests_running"] == 9
    gauges = {name: later[name] for name in later if re.search("pool|kvrelay_requests|kept", name)}
    assert gauges == {
        "kvrelay_pool_blocks_capacity": 64,
        "kvrelay_pool_capacity_bytes": 6400,
        'kvrelay_pool_blocks{state="free"}': 60,
        'kvrelay_pool_blocks{state="cached_idle"}': 4,
        'kvrelay_pool_blocks{state="in_use"}': 0,
        'kvrelay_pool_blocks{state="quarantined"}': 1,
        "kvrelay_requests_waiting": 2,
        "kvrelay_requests_running": 0,
        "kvrelay_transfer_kept_bytes": 9,
    }


def test_router_gauges_show_every_role_and_state() -> None:
    seen = RouterGauges(3, {(Role.PREFILL, WorkerState.READY): 2})
    now = series(render(router(seen).registry)[0])
    workers = {name: value for name, value in now.items() if name.startswith("kvrelay_workers")}
    assert len(workers) == len(Role) * len(WorkerState)
    assert workers.pop('kvrelay_workers{role="prefill",state="ready"}') == 2
    assert set(workers.values()) == {0.0}
    assert now["kvrelay_requests_in_flight"] == 3


def test_a_router_shows_what_became_of_its_ledger() -> None:
    events = {LedgerResult.WRITTEN: 7, LedgerResult.CONFLICT: 1}
    now = series(render(router(RouterGauges(0, {}, events, ledger_swept=3)).registry)[0])
    assert now['kvrelay_ledger_events_total{result="written"}'] == 7
    assert now['kvrelay_ledger_events_total{result="conflict"}'] == 1
    assert now['kvrelay_ledger_events_total{result="dropped"}'] == 0
    assert now["kvrelay_ledger_swept_total"] == 3


def test_what_vllm_has_is_told_by_its_names_too() -> None:
    state = RouterGauges(0, {})
    metrics = RouterMetrics(lambda: state, vllm_model="tiny")
    metrics.token_gap(0.003)
    metrics.stage_over(StageKind.QUEUED, 0.25)
    metrics.stage_over(StageKind.DECODING, 4.0)
    metrics.request_ended(Endpoint.CHAT, Outcome.OK, Timeline(), TOKENS)
    busy = replace(IDLE, in_use_blocks=15, quarantined_blocks=1, requests_running=3)
    served = WorkerMetrics(lambda: busy, {}, vllm_model="tiny")
    served.prefix_looked_up(hit_tokens=48, miss_tokens=3)
    now = series(render(metrics.registry)[0]) | series(render(served.registry)[0])
    label = '{engine="0",model_name="tiny"}'
    assert {k: v for k, v in now.items() if k.startswith("vllm:") and k.endswith(label) and v} == {
        f"vllm:inter_token_latency_seconds_count{label}": 1,
        f"vllm:inter_token_latency_seconds_sum{label}": 0.003,
        f"vllm:request_queue_time_seconds_count{label}": 1,
        f"vllm:request_queue_time_seconds_sum{label}": 0.25,
        f"vllm:request_decode_time_seconds_count{label}": 1,
        f"vllm:request_decode_time_seconds_sum{label}": 4,
        f"vllm:request_prompt_tokens_count{label}": 1,
        f"vllm:request_prompt_tokens_sum{label}": 7,
        f"vllm:request_generation_tokens_count{label}": 1,
        f"vllm:request_generation_tokens_sum{label}": 11,
        f"vllm:prompt_tokens_total{label}": 7,
        f"vllm:prompt_tokens_cached_total{label}": 5,
        f"vllm:generation_tokens_total{label}": 11,
        f"vllm:num_requests_running{label}": 3,
        f"vllm:kv_cache_usage_perc{label}": 0.25,
        f"vllm:prefix_cache_queries_total{label}": 51,
        f"vllm:prefix_cache_hits_total{label}": 48,
    }
    assert not [name for name in series(render(router().registry)[0]) if "vllm" in name]


def test_a_worker_times_the_prompts_that_it_computes_and_keeps_nothing() -> None:
    clock, metrics = HandClock(), worker()
    journal = LegJournal(Tracing.from_environment("t", "t", {}, clock), clock, metrics)
    relayed, alone, failed, waiting = (LegRef("a/0", 0, nonce) for nonce in (1, 2, 3, 4))
    for ref in (relayed, failed, waiting):
        journal.begin(ref, "prefill", "")
    journal.begin(alone, "both", "")
    clock.ns += 10**9
    for ref in (relayed, alone, failed):
        journal.stamp(ref, Moment.PREFILL_STARTED)
    clock.ns += 2 * 10**9
    for ref in (relayed, alone, failed, relayed, alone):  # the second token is no prompt's end
        journal.token(ref)
    journal.token(LegRef("b/0", 0, 9))  # computed elsewhere
    clock.ns += 3 * 10**9
    journal.end(relayed, EndReason.FINISHED, "")
    journal.end(alone, EndReason.FINISHED, "")
    journal.end(failed, EndReason.FAILED, "")
    journal.end(waiting, EndReason.CANCELLED, "")
    now = series(render(metrics.registry)[0])
    timed = {part: now[f"kvrelay_{part}_seconds_sum"] for part in ("queue", "prefill")}
    assert timed == {"queue": 3, "prefill": 6}
    assert now["kvrelay_exposed_transfer_seconds_count"] == 1
    assert now["kvrelay_exposed_transfer_seconds_sum"] == 3
    assert not journal._entries and not journal._by_key


def test_two_objects_of_one_process_share_nothing() -> None:
    first, second = worker(), worker()
    first.preempted()
    assert series(render(second.registry)[0])["kvrelay_preemptions_total"] == 0


def test_the_page_is_served_and_gone_after_close() -> None:
    metrics = worker()
    metrics.preempted()
    port, close = serve_metrics(metrics.registry, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"] == render(metrics.registry)[1]
        assert series(answer.read())["kvrelay_preemptions_total"] == 1
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/", timeout=5)
    with socket.create_connection(("127.0.0.1", port)):  # a client that never asks holds up nothing
        urllib.request.urlopen(f"{url}/metrics", timeout=5).close()
        close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert "kvrelay-metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^metrics port 127.0.0.1:{port}: Address already"):
            serve_metrics(worker().registry, "127.0.0.1", port)
