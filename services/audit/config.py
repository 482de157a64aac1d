"""The settings of `kvrelay audit`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvrelay.shared.config import ClusterName, Named, Names, RedisUrl, Settings


class AuditConfig(Settings):
    """Which cluster is looked at, and how the result is shown."""

    table: ClassVar[str] = "audit"

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The cluster's Redis. Give one with a password by environment or file, not by flag."""
    cluster: ClusterName = "kvrelay"
    """Name of the cluster: several can share one Redis."""
    routers: Annotated[Names, Named(setting="router")] = ()
    """Where a router can be reached, like http://10.0.0.9:8000; may be given several times. Needed
    only for routers that listen on all addresses: of the others Redis knows where they are."""
    as_json: Annotated[bool, Named(setting="json")] = False
    """One JSON object on stdout instead of a table."""
