"""A small receiver of OTLP over HTTP that keeps the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvrelay.services.valkey import free_port


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int


class SpanReceiver:
    """Listens on a free port of this machine from `with` to its end."""

    def __init__(self) -> None:
        receiver = self
        self.spans: list[Span] = []
        self.closed = True

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            timeout = 2

            def do_POST(self) -> None:
                if receiver.closed:  # a connection that was kept must not outlive its server
                    self.close_connection = True
                    return
                receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._handler, self._port = Handler, free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> SpanReceiver:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.closed = False
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Its port is closed."""
        self.__exit__()
        yield
        self.__enter__()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        names["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                    )
                    for span in scope.spans
                ]

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in [*self.spans] if span.trace == trace]
