"""What `kvrelay up` is to run: the settings of all parts, resolved and checked, nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import Field

from kvrelay.services.router.config import RouterConfig
from kvrelay.shared.config import PREFIX, RESERVED, Settings
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

SHARED_DUTY: Final = 0.22
"""Of one of the processors. Measured with 4 streams and prompts of 2,000 tokens on two: at 0.3 the
streams' gaps are 60 ms and the prompts take 930 ms, at 0.22 80 and 880, at 0.15 100 and 850."""


class UpConfig(Settings):
    """What `kvrelay up` starts."""

    table: ClassVar[str] = "up"

    prefill: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of prefill workers."""
    decode: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of decode workers."""
    unsplit: bool = False
    """Workers that do both, as many as `decode`, and no prefill: the baseline to compare with."""
    verbose: bool = False
    """Show the logs of all parts here instead of keeping them in files."""
    ready_s: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest start of a part, in seconds."""
    grace_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Time for a part to end by itself when all are stopped, in seconds."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that runs: resolved, checked, not started."""

    up: UpConfig
    router: RouterConfig
    worker: WorkerConfig
    """The pattern of all workers; role and name are filled in."""
    external_redis: bool
    """Whether the configured Redis is somebody else's: then none is started."""


def worker_configs(deployment: Deployment) -> list[WorkerConfig]:
    """One per worker: ports are chosen by the system, so equal settings cannot collide."""
    up, pattern = deployment.up, deployment.worker
    duty = pattern.shared_duty if "shared_duty" in pattern.model_fields_set else SHARED_DUTY
    given = {Role.DECODE: {"shared_duty": duty}}  # one affinity for all: they share processors
    counts = {Role.PREFILL: up.prefill, Role.DECODE: up.decode}
    if up.unsplit:
        counts = {Role.BOTH: up.decode}
    return [
        pattern.model_copy(
            update={"role": role, "name": f"{role.value}-{i}", "port": 0, "metrics_port": 0}
            | given.get(role, {})
        )
        for role, count in counts.items()
        for i in range(count)
    ]


def child_env(config: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """What a part's process sees: our environment with exactly this configuration in it.

    The environment and not the command line, which any user of the machine can read.
    """
    kept = {k: v for k, v in base.items() if not k.startswith(PREFIX) or k in RESERVED}
    kept.pop("KVRELAY_CONFIG", None)
    return kept | config.to_env()
