"""Clients for Redis whose every call ends soon, and the one place that maps redis-py's errors.

The library's own retries are off: each caller knows better when to try again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvrelay.shared.errors import ConfigError, StoreError

SCHEMES = ("redis", "rediss", "unix")


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
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )


def connect_async(url: str, timeout_s: float, connections: int) -> redis.asyncio.Redis:
    """A client for one event loop over at most `connections` sockets. Raises `ConfigError`."""
    with _reading(url):
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=AsyncRetry(NoBackoff(), 0),
        )
        return redis.asyncio.Redis.from_pool(pool)


@contextmanager
def mapped_errors(url: str) -> Iterator[None]:
    """Turns whatever a Redis call raises into `StoreError`, naming the server."""
    try:
        yield
    except (TimeoutError, redis.TimeoutError) as error:
        raise StoreError(f"Redis at {server_name(url)} does not answer") from error
    except (redis.RedisError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise StoreError(f"Redis at {server_name(url)}: {reason}") from error


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Parsing errors can quote the URL, and with it a password: they are not passed on."""
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError("redis URL: must begin with redis://, rediss:// or unix://")
    try:
        yield
    except ValueError:
        raise ConfigError(f"redis URL for {server_name(url)}: cannot be read") from None
