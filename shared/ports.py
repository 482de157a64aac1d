"""Whether a port can be listened on, asked before anything is loaded that takes time."""

from __future__ import annotations

import errno
import socket

from kvrelay.shared.errors import ConfigError


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
                f"port is {port}: another program listens there on {host}; "
                "choose another with --port"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host is {host!r}: no address of this machine") from error
        raise ConfigError(f"port is {port} on {host}: {error.strerror}") from error
