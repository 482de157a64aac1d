"""The settings of `kvrelay doctor`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvrelay.shared.config import ClusterName, Named, RedisUrl, Settings


class DoctorConfig(Settings):
    """Which cluster is looked at, and how it is shown."""

    table: ClassVar[str] = "doctor"

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The cluster's Redis. Give one with a password by environment or file, not by flag."""
    cluster: ClusterName = "kvrelay"
    """Name of the cluster: several can share one Redis."""
    as_json: Annotated[bool, Named(setting="json")] = False
    """JSON on stdout instead of tables."""
