"""Endpoints to the UCX workers of this host, each kept while anyone may come back to it.

Between two processes that share memory an endpoint has nothing that closing it would end: what was
sent lies in the other's queue, and what arrives is asked for by tag. But closing one that the other
side has connected to as well does not free it, and a new one maps the other's queues once more. So
whoever loses a peer here leaves its endpoint to the next who connects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

IDLE_S: Final = 120.0
"""Unused for so long, an endpoint is closed when another one is made."""


@dataclass(slots=True)
class _Kept:
    endpoint: Any
    used_s: float


class HostEndpoints:
    """By the addresses of the UCX workers that they lead to."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._kept: dict[bytes, _Kept] = {}

    def find(self, worker: bytes) -> Any | None:
        kept = self._kept.get(worker)
        if kept is None:
            return None
        kept.used_s = self._now_s()
        return kept.endpoint

    def keep(self, worker: bytes, endpoint: Any, in_use: Collection[int]) -> None:
        """Add a new one. `in_use` are the ids of endpoints that a peer has."""
        now_s = self._now_s()
        for key, kept in [*self._kept.items()]:
            if id(kept.endpoint) in in_use:
                kept.used_s = now_s
            elif kept.used_s < now_s - IDLE_S:
                del self._kept[key]
                kept.endpoint.abort()
        self._kept[worker] = _Kept(endpoint, now_s)

    def forget(self, endpoint: Any) -> None:
        """It was aborted."""
        self._kept = {
            key: kept for key, kept in self._kept.items() if kept.endpoint is not endpoint
        }

    def close(self) -> None:
        for kept in self._kept.values():
            kept.endpoint.abort()
        self._kept.clear()
