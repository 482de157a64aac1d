"""Clients for Redis whose every call ends soon, and the one place that maps redis-py's errors.

The library's own retries are off: each caller knows better when to try again.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, Final, cast
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvrelay.shared.errors import ConfigError, StoreError
from kvrelay.shared.store.sentinel import SCHEME, AsyncMaster, Master, login_of, parse_sentinel

SCHEMES = ("redis", "rediss", "unix", SCHEME)
CONNECT_S: Final = 2.0
"""Also what taking leave of a server may take."""
KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds, seconds and probes. A host that vanished is noticed 11 s after its last word, by the
kernel: a process that waits for an answer sleeps on."""


def server_name(url: str) -> str:
    """Where `url` points, fit for a message: without user, password and options."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


def script(name: str) -> str:
    """The text of `<name>.lua`, which lies beside this module."""
    return (resources.files(__package__) / f"{name}.lua").read_text(encoding="utf-8")


def connect(url: str, timeout_s: float) -> redis.Redis:
    """A client for one thread; nothing is sent yet. Raises `ConfigError`."""
    with _reading(url):
        if urlsplit(url).scheme == SCHEME:
            return _by_sentinels(url, timeout_s)
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )


def connect_async(url: str, connections: int) -> redis.asyncio.Redis:
    """A client for one event loop over at most `connections` sockets. Raises `ConfigError`.

    Each call stands in an `asyncio.timeout` of its caller. The library's own way to time a command
    out is `asyncio.wait_for`, which before Python 3.12 can lose the cancellation of a task.
    """
    with _reading(url):
        options: dict[str, Any] = {
            "max_connections": connections,
            "timeout": None,
            "socket_connect_timeout": CONNECT_S,
            "retry": AsyncRetry(NoBackoff(), 0),
        }
        if urlsplit(url).scheme == SCHEME:
            named = parse_sentinel(url)
            pool = redis.asyncio.BlockingConnectionPool(
                connection_class=redis.asyncio.sentinel.SentinelManagedConnection,
                connection_pool=AsyncMaster(named, CONNECT_S),
                **login_of(named),
                **options,
            )
        else:
            pool = redis.asyncio.BlockingConnectionPool.from_url(url, **options)
        pool.connection_kwargs["socket_timeout"] = None  # whatever the URL says
        if urlsplit(url).scheme != "unix":
            pool.connection_kwargs |= {
                "socket_keepalive": True,
                "socket_keepalive_options": KEEPALIVE,
            }
        return redis.asyncio.Redis.from_pool(pool)


def _by_sentinels(url: str, timeout_s: float) -> redis.Redis:
    named = parse_sentinel(url)
    pool = redis.ConnectionPool(
        connection_class=redis.sentinel.SentinelManagedConnection,
        connection_pool=Master(named, timeout_s),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        **login_of(named),
    )
    return redis.Redis.from_pool(pool)


def check_store(url: str) -> None:
    """Raise `StoreError` if the server does not answer now."""
    client = connect(url, CONNECT_S)
    try:
        with mapped_errors(url):
            client.ping()
    finally:
        client.close()


class Line:
    """One connection of `client` for commands that are sent over and over, one thread's own.

    The library makes the connection, with its TLS and passwords; the exchange itself is two calls,
    because a process that wakes from idle pays for every page of code and data it touches.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._connection = cast(redis.Connection, client.connection_pool.make_connection())

    def pack(self, *command: str | int) -> bytes:
        return b"".join(self._connection.pack_command(*command))  # type: ignore[no-untyped-call]

    def ask(self, packed: bytes) -> bytes:
        """The answer's one line; commands whose answer is longer do not belong here.

        Raises what redis-py raises, or `OSError`; then the next call connects anew.
        """
        stream = self._stream()
        try:
            stream.sendall(packed)
            answer = stream.recv(4096)
            while not answer.endswith(b"\r\n"):
                more = stream.recv(4096)
                if not more:
                    raise ConnectionError("closed the connection")
                answer += more
            if answer.startswith(b"-READONLY"):
                raise ConnectionError("is a replica now")  # the next one is to another server
        except OSError:
            self.close()
            raise
        return answer

    @property
    def descriptor(self) -> int | None:
        """The socket's, for whoever speaks on it without us; None before the first call or for TLS.

        Between two calls of `ask` nothing is on its way.
        """
        stream = cast(object, self._connection._sock)
        plain = isinstance(stream, socket.socket) and not isinstance(stream, ssl.SSLSocket)
        return cast(socket.socket, stream).fileno() if plain else None

    def close(self) -> None:
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _stream(self) -> socket.socket:
        """The library has no public name for it."""
        if self._connection._sock is None:
            self._connection.connect()  # type: ignore[no-untyped-call]
        return cast(socket.socket, self._connection._sock)


def integer_reply(line: bytes) -> int:
    """Raises `redis.ResponseError` for an error or anything else."""
    if not line.startswith(b":"):
        raise redis.ResponseError(line.decode(errors="replace").lstrip("-"))
    return int(line[1:])


@contextmanager
def mapped_errors(url: str) -> Iterator[None]:
    """Turns whatever a Redis call raises into `StoreError`, naming the server."""
    try:
        yield
    except (TimeoutError, redis.TimeoutError) as error:
        raise StoreError(f"Redis at {server_name(url)} does not answer") from error
    except redis.AuthenticationError as error:
        raise StoreError(f"Redis at {server_name(url)} refuses the user or the password") from error
    except (redis.RedisError, OSError) as error:
        refused = isinstance(error, redis.ConnectionError)  # which says the address once more
        system = error.__cause__ or error.__context__ if refused else None
        words = isinstance(system, OSError) and system.strerror
        reason = " ".join((words or str(error)).split())[:200].rstrip(".") or type(error).__name__
        raise StoreError(f"Redis at {server_name(url)}: {reason}") from error


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Parsing errors can quote the URL, and with it a password: they are not passed on."""
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(
            "redis URL: must begin with redis://, rediss://, unix:// or redis+sentinel://"
        )
    if urlsplit(url).scheme == SCHEME:
        try:
            parse_sentinel(url)
        except ValueError as error:  # ours, which quotes no secret
            raise ConfigError(f"redis URL: {error}") from None
    try:
        yield
    except ValueError:
        raise ConfigError(f"redis URL for {server_name(url)}: cannot be read") from None
