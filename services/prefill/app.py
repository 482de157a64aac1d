"""The prefill service: a worker that computes prompts and relays their KV blocks."""

from __future__ import annotations

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.types import Role
from kvrelay.shared.worker.app import run as run_worker
from kvrelay.shared.worker.config import WorkerConfig


def run(config: WorkerConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    if config.role is not Role.PREFILL:
        raise ConfigError(f"role is {config.role.value!r}: a prefill worker has the role prefill")
    return run_worker(config)
