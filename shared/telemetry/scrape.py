"""The page a Prometheus server reads from a worker: `GET /metrics`, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Final

from prometheus_client import CollectorRegistry

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.ports import authority
from kvrelay.shared.telemetry.metrics import render

READ_TIMEOUT_S: Final = 5.0


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int
) -> tuple[int, Callable[[], None]]:
    """Serve `registry` from a daemon thread that blocks in the kernel between scrapes.

    Port 0 picks a free one. Returns the port and a function that closes it for good. Raises
    `ConfigError` when it cannot be had.
    """
    try:
        server = _Server(registry, host, port)
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

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.registry = registry
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
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body, content_type = render(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is not worth a line."""
