"""The decode service: a worker that continues relayed prompts, or (role both) serves alone."""

from __future__ import annotations

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.types import Role
from kvrelay.shared.worker.app import run as run_worker
from kvrelay.shared.worker.config import WorkerConfig


def run(config: WorkerConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    if config.role is Role.PREFILL:
        raise ConfigError("role is 'prefill': a decode worker has the role decode or both")
    return run_worker(config)
