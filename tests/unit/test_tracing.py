"""Traces: real OTLP bytes at a real receiver, one trace over processes, and nothing in the way."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.telemetry import otlp
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.telemetry.tracing import RequestTrace, Tracing, request_attributes

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WALL_OFFSET_NS = 1_700_000_000_000_000_000


class FixedClock:
    """A machine whose monotonic clock began at `WALL_OFFSET_NS`."""

    def now_ns(self) -> int:
        return 5

    def wall_ns(self) -> int:
        return WALL_OFFSET_NS + 5


class Receiver:
    """An OTLP receiver over HTTP that keeps what it got."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.arrived = threading.Semaphore(0)
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.status  # of now: the test goes on once the request is there
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                receiver.arrived.release()
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def spans(self) -> dict[str, Span]:
        """By name."""
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ENDPOINT", "PROTOCOL", "TRACES_ENDPOINT", "TRACES_PROTOCOL", "TIMEOUT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    yield
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


def opened(monkeypatch: pytest.MonkeyPatch, service: str, **variables: str) -> Tracing:
    environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return Tracing.from_environment(service, "i-1", environ, FixedClock())


def router_timeline() -> Timeline:
    timeline = Timeline()
    for moment, now_ns in (
        (Moment.RECEIVED, 100),
        (Moment.ASSIGNED, 120),
        (Moment.FIRST_TOKEN, 300),
        (Moment.FINISHED, 900),
    ):
        timeline.stamp(moment, now_ns)
    return timeline


def times(span: Span) -> tuple[int, int]:
    """Begin and end on the monotonic clock of `FixedClock`."""
    return span.start_time_unix_nano - WALL_OFFSET_NS, span.end_time_unix_nano - WALL_OFFSET_NS


def trace_one(tracing: Tracing, headers: dict[str, str]) -> RequestTrace:
    request = tracing.begin(headers, 100)
    attributes = request_attributes("chat", "tiny", 7, 11)
    tracing.spans_from(router_timeline(), request, "router", attributes)
    return request


def test_one_trace_covers_caller_router_and_worker(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    router = opened(monkeypatch, "kvrelay-router", ENDPOINT=receiver.endpoint)
    worker = opened(monkeypatch, "kvrelay-prefill", ENDPOINT=receiver.endpoint)
    at_router = trace_one(router, {"traceparent": CALLER, "tracestate": "vendor=1"})
    at_worker = worker.begin(at_router.headers, 130)
    timeline = Timeline()
    timeline.stamp(Moment.PREFILL_QUEUED, 130)
    timeline.stamp(Moment.PREFILL_STARTED, 150)
    timeline.stamp(Moment.PREFILL_ENDED, 290)
    worker.spans_from(timeline, at_worker, "prefill", {"kvrelay.attempt": 0})
    router.close()
    worker.close()
    spans = receiver.spans()
    assert {name: times(span) for name, span in spans.items()} == {
        "chat tiny": (100, 900),
        "assign": (100, 120),
        "first token": (120, 300),
        "stream": (300, 900),
        "prefill": (130, 290),
        "queue": (130, 150),
        "compute prompt": (150, 290),
    }
    assert {span.trace_id.hex() for span in spans.values()} == {CALLER[3:35]}
    root, own = spans["chat tiny"], spans["prefill"]
    assert root.parent_span_id.hex() == CALLER[36:52]
    assert own.parent_span_id == root.span_id == spans["stream"].parent_span_id
    assert spans["queue"].parent_span_id == own.span_id
    assert (root.kind, own.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_SERVER)
    assert at_worker.headers["tracestate"] == "vendor=1"
    services = {
        attribute.value.string_value
        for request in receiver.requests
        for resource in request.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert services == {"kvrelay-router", "kvrelay-prefill"}


def test_a_request_span_speaks_genai_conventions_and_marks_failure(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    tracing = opened(monkeypatch, "kvrelay-router", ENDPOINT=receiver.endpoint)
    request = tracing.begin({"traceparent": "garbage"}, 100)
    attributes = {**request_attributes("text_completion", "tiny", 7, 11), "error.type": "deadline"}
    tracing.spans_from(router_timeline(), request, "router", attributes)
    tracing.close()
    root = receiver.spans()["text_completion tiny"]
    assert root.parent_span_id == b""
    assert root.status.code == 2
    assert {a.key: a.value.string_value or a.value.int_value for a in root.attributes} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 11,
        "error.type": "deadline",
    }


def test_a_caller_that_does_not_sample_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    tracing = opened(monkeypatch, "kvrelay-router", ENDPOINT=receiver.endpoint)
    request = trace_one(tracing, {"traceparent": CALLER[:-2] + "00"})
    tracing.close()
    assert receiver.requests == []
    assert request.headers["traceparent"].endswith("-00")


def test_the_same_spans_go_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[ExportTraceServiceRequest] = []

    def export(request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
        got.append(request)
        return ExportTraceServiceResponse()

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    method = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Export": method})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        endpoint = f"http://127.0.0.1:{port}"
        tracing = opened(monkeypatch, "kvrelay-router", ENDPOINT=endpoint, PROTOCOL="grpc")
        trace_one(tracing, {})
        tracing.close()
        server.stop(None)
    names = [span.name for span in got[0].resource_spans[0].scope_spans[0].spans]
    assert names == ["assign", "first token", "stream", "chat tiny"]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("black_hole", [False, True])
def test_an_exporter_that_is_away_costs_one_line_and_a_bounded_end(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    black_hole: bool,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts and never answers
        port = listener.getsockname()[1] if black_hole else 1
        endpoint = f"http://127.0.0.1:{port}"
        tracing = opened(monkeypatch, "kvrelay-router", ENDPOINT=endpoint, PROTOCOL=protocol)
        for _ in range(2_000):
            trace_one(tracing, {})
        closing = threading.Thread(target=tracing.close, args=(0.6,))
        closing.start()
        closing.join(3)
        assert not closing.is_alive()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) <= 1
    assert all(message.startswith(f"no traces: {endpoint} takes none") for message in messages)


def test_a_receiver_that_refuses_is_reported_once_and_once_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, receiver: Receiver
) -> None:
    monkeypatch.setattr(otlp, "EXPORT_EVERY_MS", 10)
    caplog.set_level(logging.INFO)
    tracing = opened(monkeypatch, "kvrelay-router", ENDPOINT=receiver.endpoint)
    for receiver.status in (400, 400, 400, 200):
        trace_one(tracing, {})
        assert receiver.arrived.acquire(timeout=5)
    tracing.close()
    assert caplog.messages == [
        f"no traces: {receiver.endpoint} takes none; dropping spans meanwhile",
        f"{receiver.endpoint} takes traces again",
    ]


def test_without_an_endpoint_headers_are_passed_on_and_nothing_runs() -> None:
    threads = threading.active_count()
    tracing = Tracing.from_environment("kvrelay-router", "i-1", {}, FixedClock())
    assert not tracing.enabled
    request = trace_one(tracing, {"traceparent": CALLER, "tracestate": "vendor=1", "cookie": "x"})
    assert request == RequestTrace({"traceparent": CALLER, "tracestate": "vendor=1"}, None)
    assert trace_one(tracing, {}) == RequestTrace({}, None)
    tracing.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_HEADERS": "a=b"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_the_standard_variables_can_switch_it_off(environ: dict[str, str]) -> None:
    assert not Tracing.from_environment("s", "i", environ, FixedClock()).enabled


def test_an_unknown_protocol_is_named() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    }
    message = "^OTEL_EXPORTER_OTLP_PROTOCOL: must be grpc or http/protobuf, found 'http/json'$"
    with pytest.raises(ConfigError, match=message):
        Tracing.from_environment("s", "i", environ, FixedClock())
