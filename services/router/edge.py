"""The router's HTTP side put together: its ports, and which routes are on which."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from kvrelay.services.router.admin import (
    DRAIN_PATH,
    LEGS_PATH,
    Page,
    admin_route,
    drain_route,
)
from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.router.dashboard.routes import OPEN_PATHS
from kvrelay.services.router.gate import PROBES, GateRules
from kvrelay.services.router.generation import Cluster
from kvrelay.services.router.http import Server
from kvrelay.services.router.openai.api import Pages, create_admin_app, create_app
from kvrelay.services.router.openai.exchange import BodyLimits
from kvrelay.services.router.openai.generate import EdgeSettings
from kvrelay.services.router.openai.observer import EdgeObserver
from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.ports import authority, is_wildcard


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound, and nobody answers yet."""

    clients: socket.socket
    admin: socket.socket | None

    @property
    def address(self) -> str:
        """Where administration is found; "" when that depends on who asks."""
        host, port = (self.admin or self.clients).getsockname()[:2]
        return "" if is_wildcard(host) else authority(host, port)


def open_ports(config: RouterConfig) -> Ports:
    """Raises `ConfigError` naming the setting when one cannot be had."""
    clients = bind(config.host, config.port, "port")
    if config.admin_port is None:
        return Ports(clients, None)
    return Ports(clients, bind(config.admin_host, config.admin_port, "admin-port"))


def bind(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        place, reason = authority(host, port), error.strerror or str(error)
        raise ConfigError(f"{setting}: cannot listen on {place}: {reason}") from error
    return listener


@dataclass(frozen=True, slots=True)
class Administration:
    """What is shown and done beside serving."""

    metrics: Callable[[], bytes]
    queued: Callable[[], int]
    legs: Page
    drain: Callable[[], None]
    token: str
    """Whoever knows it may ask for the last two."""
    dashboard: Sequence[Route] = ()
    """For who may ask for metrics."""

    def routes(self) -> list[Route]:
        guarded = [admin_route(self.token, self.legs), drain_route(self.token, self.drain)]
        return [*guarded, *self.dashboard]


Served = Sequence[tuple[Server, socket.socket]]
"""The clients' port first."""


def servers(
    settings: EdgeSettings,
    ports: Ports,
    administration: Administration,
    cluster: Cluster,
    card: Callable[[], ModelCard | None],
    observer: EdgeObserver,
) -> Served:
    """With an admin port the clients' one has no /metrics, /admin/* and /dashboard."""
    metrics = administration.metrics
    pages = Pages(metrics if ports.admin is None else None, administration.queued)
    app = create_app(cluster, card, settings, observer, pages)
    if ports.admin is None:
        app.router.routes += administration.routes()
        return [(Server(app), ports.clients)]
    beside = create_admin_app(cluster, metrics, administration.routes())
    return [(Server(app), ports.clients), (Server(beside), ports.admin)]


def edge_settings(config: RouterConfig, keys: ApiKeys) -> EdgeSettings:
    """What of the settings the routes keep to."""
    own_guard = {LEGS_PATH, DRAIN_PATH, *OPEN_PATHS} if config.admin_port is None else set()
    gate = GateRules(
        keys,
        frozenset(config.allowed_origins),
        config.max_concurrent_requests,
        unguarded=PROBES | own_guard,
    )
    return EdgeSettings(
        body=BodyLimits(bytes=config.max_body_bytes),
        lenient_fields=config.lenient_fields,
        gate=gate,
    )
