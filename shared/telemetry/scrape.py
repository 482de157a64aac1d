"""What a worker says over HTTP: `/metrics` for Prometheus, `/health` and `/ready` for probes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Final

from prometheus_client import CollectorRegistry

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.ports import authority
from kvrelay.shared.telemetry.metrics import render

READ_TIMEOUT_S: Final = 5.0

Ailment = Callable[[], str]
"""Why the answer is 503; empty for 200. Called on a thread of its own."""


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, probes: Mapping[str, Ailment] = {}
) -> tuple[int, Callable[[], None]]:
    """Serve `registry` from a daemon thread that blocks in the kernel between scrapes.

    `probes`: what else is answered, by path. Port 0 picks a free one. Returns the port and a
    function that closes it for good. Raises `ConfigError` when it cannot be had.
    """
    try:
        server = _Server(registry, host, port, probes)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"metrics port {authority(host, port)}: {reason}") from error
    thread = threading.Thread(target=server.serve, name="kvrelay-metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.stop()
        thread.join()

    return server.port, close


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # a scraper that reads slowly must not delay the end

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, probes: Mapping[str, Ailment]
    ) -> None:
        self.registry = registry
        self.probes = probes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._stopping = False
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def serve(self) -> None:
        # Not serve_forever, which looks twice a second whether it shall stop.
        while not self._stopping:
            self.handle_request()
        self.server_close()

    def stop(self) -> None:
        """The connection wakes `serve`, which then sees that it is over."""
        self._stopping = True
        host = self.server_address[0]
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
        try:
            socket.create_connection((local, self.port), timeout=READ_TIMEOUT_S).close()
        except OSError:
            return  # the listener is closed already


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, *render(self.server.registry))
        elif (ailment := self.server.probes.get(path)) is not None:
            reason = ailment()
            said = {"status": "failing", "reason": reason} if reason else {"status": "ok"}
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            self._answer(status, json.dumps(said).encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is not worth a line."""
