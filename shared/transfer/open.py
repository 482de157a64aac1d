"""Chooses and builds a process's transport."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import MutableMapping
from typing import Literal, TypeAlias

from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.transfer.faulty import FaultyTransport
from kvrelay.shared.transfer.protocol import Transport
from kvrelay.shared.transfer.tcp import TcpTransport
from kvrelay.shared.transfer.ucx import UcxTransport, ucx_environment
from kvrelay.shared.transfer.ucx_progress import ucx_installed

Scheme: TypeAlias = Literal["auto", "ucx", "tcp"]

_log = logging.getLogger(__name__)


def open_transport(
    scheme: Scheme,
    *,
    host: str,
    advertise: str | None = None,
    chaos: Chaos | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> Transport:
    """A transport that still has to `listen`. `auto` is ucx where it is installed, else tcp.

    `host` is the address to bind and `advertise` the one to tell others, for tcp. ucx takes its
    interfaces from `UCX_NET_DEVICES`: by default all, or only loopback where `host` is on it. For
    ucx this adds defaults to `environ`, which UCX reads when it starts, and keeps what is set
    there. With `chaos` it does to its messages what the plan says. Raises `ConfigError`.
    """
    transport = _transport(scheme, host, advertise, environ)
    return transport if chaos is None else FaultyTransport(transport, chaos)


def _transport(
    scheme: Scheme, host: str, advertise: str | None, environ: MutableMapping[str, str]
) -> Transport:
    if scheme not in ("auto", "ucx", "tcp"):
        raise ConfigError(f"transport: must be auto, ucx or tcp, got {scheme!r}")
    if scheme == "auto" and not ucx_installed():
        _log.warning("UCX is not installed: KV blocks travel over plain TCP, which is slower")
        scheme = "tcp"
    if scheme == "tcp":
        return TcpTransport(host, advertise)
    if _is_loopback(host):
        environ.setdefault("UCX_NET_DEVICES", "lo")
    environ.update(ucx_environment(environ))
    return UcxTransport()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
