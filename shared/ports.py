"""Hosts and ports as people write them: joined, told from wildcards, tried before a start."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress

from kvrelay.shared.errors import ConfigError


def authority(host: str, port: int) -> str:
    """`host:port`, as in a URL: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def plain_host(host: str) -> str:
    """The host as every library understands it: without brackets. Raises `ValueError`."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    with suppress(ValueError):
        ipaddress.ip_address(bare)
        return bare
    if not bare or ":" in bare or not bare.isprintable() or " " in bare:
        raise ValueError("must be a host name or an address, without a port")
    try:
        full = socket.inet_ntoa(socket.inet_aton(bare))
    except OSError:
        return bare
    # Some libraries take 0 or 10.7 for an address and others for a name.
    raise ValueError(f"must be a host name or an address in full, which would be {full}")


def is_wildcard(host: str) -> bool:
    """Whether it means every address of a machine, however it is spelled: none to connect to."""
    if host in ("", "*"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        try:
            return not any(socket.inet_aton(host))  # 0, 0.0, 00.0.0.0
        except (OSError, ValueError):
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def check_listen(host: str, port: int) -> None:
    """Raise `ConfigError` naming `host` or `port` if nobody could listen there now."""
    try:
        [(family, kind, *_, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError(f"host is {host!r}: {error.strerror}") from error
    try:
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port: {port} on {host} is taken by another program; choose another with --port"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host is {host!r}: no address of this machine") from error
        raise ConfigError(f"port is {port} on {host}: {error.strerror}") from error
