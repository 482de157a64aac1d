"""A server that sentinels name: whoever connects asks them which one is the master now.

    redis+sentinel://[user:password@]host[:port],host[:port]/service[/database]

User and password are the servers'; sentinels are asked without. A connection that breaks, or finds
that its server is a replica now, is made anew, and so it follows a fail-over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis.asyncio.sentinel
import redis.sentinel

SCHEME: Final = "redis+sentinel"
PORT: Final = 26379
_SERVICE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int
    user: str | None
    password: str | None


def parse_sentinel(url: str) -> SentinelUrl:
    """Raises `ValueError`, which says what is wrong and quotes nothing that may be secret."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts:
        raise ValueError("sentinels: at least one host is needed")
    if not _SERVICE.fullmatch(service):
        raise ValueError("service: must follow the sentinels, as in redis+sentinel://host/service")
    if not re.fullmatch(r"\d{0,4}", database):
        raise ValueError(f"database: must be a number, got {database!r}")
    if parts.query:
        raise ValueError("options: none are known in a redis+sentinel URL")
    sentinels = tuple(map(_address, hosts.split(",")))
    names = (unquote(user) or None, unquote(password) or None)
    return SentinelUrl(sentinels, service, int(database or 0), *names)


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text.strip())
    if found is None:
        raise ValueError(f"sentinels: {text.strip()!r} is not host:port")
    port = int(found[2] or PORT)
    if not 1 <= port <= 65535:
        raise ValueError(f"sentinels: port must be 1 to 65535, got {port}")
    return found[1].strip("[]"), port


class Master:
    """What the library's managed connections ask of their pool; none holds on to it."""

    is_master = True
    check_connection = False

    def __init__(self, url: SentinelUrl, timeout_s: float) -> None:
        self._service = url.service
        self._sentinel = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            url.sentinels, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )

    def get_master_address(self) -> tuple[str, int]:
        host, port = self._sentinel.discover_master(self._service)  # type: ignore[no-untyped-call]
        return host, port


class AsyncMaster:
    """The same for connections of an event loop."""

    is_master = True
    check_connection = False

    def __init__(self, url: SentinelUrl, timeout_s: float) -> None:
        self._service = url.service
        self._sentinel = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            url.sentinels, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )

    async def get_master_address(self) -> tuple[str, int]:
        try:
            host, port = await self._sentinel.discover_master(self._service)
        finally:  # asked seldom: no connection to a sentinel is kept
            for sentinel in self._sentinel.sentinels:
                await sentinel.aclose()
        return host, port


def login_of(url: SentinelUrl) -> dict[str, Any]:
    """As the library calls it."""
    return {"db": url.database, "username": url.user, "password": url.password}
