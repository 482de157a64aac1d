"""Where a command's settings come from: flags, environment and file, each name known to some."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvrelay.services.audit.config import AuditConfig
from kvrelay.services.bench.config import BenchConfig
from kvrelay.services.deployment import UpConfig
from kvrelay.services.doctor.config import DoctorConfig
from kvrelay.services.drain_config import DrainConfig
from kvrelay.services.router.config import RouterConfig
from kvrelay.shared import config as settings
from kvrelay.shared.worker.config import WorkerConfig

ALL_SETTINGS = (
    *(UpConfig, RouterConfig, WorkerConfig, BenchConfig),
    *(DrainConfig, AuditConfig, DoctorConfig),
)


def read(flags: Mapping[str, object]) -> settings.Sources:
    """All that was said in flags, environment and file; unknown settings are errors."""
    sources = settings.read_sources(flags, os.environ)
    settings.check_known(sources, ALL_SETTINGS)
    return sources
