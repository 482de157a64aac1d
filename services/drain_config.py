"""The settings of `kvrelay drain`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvrelay.shared.config import ClusterName, RedisUrl, Settings


class DrainConfig(Settings):
    """Who is to go, and how quickly."""

    table: ClassVar[str] = "drain"

    worker: Annotated[str, Field(min_length=1, max_length=64)]
    """The worker's name, or how its incarnation begins."""
    within_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """Time for its requests to end or to move, in seconds; unset means the worker's own drain_s."""
    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The cluster's Redis. Give one with a password by environment or file, not by flag."""
    cluster: ClusterName = "kvrelay"
    """Name of the cluster: several can share one Redis."""
