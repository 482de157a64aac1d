"""One request is one trace over all processes."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from tests.stack import until
from tests.system.cluster import Cluster
from tests.system.load import Load
from tests.system.receiver import Span, SpanReceiver

pytestmark = pytest.mark.system
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_one_trace_runs_through_router_prefill_and_decode(
    cluster: Cluster, receiver: SpanReceiver
) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"model": cluster.model, "prompt": "one two", "max_tokens": 5, "ignore_eos": True},
        headers={"traceparent": f"00-{TRACE}-{CALLER}-01"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    until(lambda: len(receiver.of_trace(TRACE)) >= 11, 10, "all spans have arrived")
    spans = {(span.service, span.name): span for span in receiver.of_trace(TRACE)}
    request = f"text_completion {cluster.model}"
    assert children(spans, CALLER) == [("kvrelay-router", request)]
    own = spans["kvrelay-router", request]
    assert children(spans, own.id) == [
        ("kvrelay-decode", "decode"),
        ("kvrelay-prefill", "prefill"),
        ("kvrelay-router", "assign"),
        ("kvrelay-router", "first token"),
        ("kvrelay-router", "stream"),
    ]
    prefill, decode = (spans[f"kvrelay-{role}", role] for role in ("prefill", "decode"))
    in_prefill = ["queue", "compute prompt", "transfer exposed"]
    assert in_order(spans, prefill) == in_prefill
    assert in_order(spans, decode) == ["receive blocks", "generate"]
    generate, compute = spans["kvrelay-decode", "generate"], spans["kvrelay-prefill", in_prefill[1]]
    assert compute.end_ns <= generate.start_ns, "decode continues after the prompt is computed"
    assert all(own.start_ns <= s.start_ns <= s.end_ns for s in spans.values())


def test_a_receiver_that_is_away_harms_no_request_and_is_told_once(
    cluster: Cluster, receiver: SpanReceiver
) -> None:
    """H12."""
    told = cluster.logs().count("no traces: ")
    with receiver.away(), Load(cluster.url, cluster.model) as load:
        load.wait_answers(12)
        until(lambda: cluster.logs().count("no traces: ") > told, 20, "somebody tells")
    assert load.wrong() == {}
    assert cluster.logs().count("no traces: ") - told <= len(cluster.parts)


def children(spans: dict[tuple[str, str], Span], parent: str) -> list[tuple[str, str]]:
    return sorted(name for name, span in spans.items() if span.parent == parent)


def in_order(spans: dict[tuple[str, str], Span], parent: Span) -> list[str]:
    """The names of a span's children, which follow each other without overlap."""
    found = sorted(
        (span for span in spans.values() if span.parent == parent.id), key=lambda s: s.start_ns
    )
    for before, after in pairwise(found):
        assert before.end_ns <= after.start_ns, f"{before.name} overlaps {after.name}"
    return [span.name for span in found]
