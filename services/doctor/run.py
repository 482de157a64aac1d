"""Looks, diagnoses, shows; the exit status says what was found."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace

from rich.console import Console

from kvrelay.services.doctor.cluster import look_at_cluster
from kvrelay.services.doctor.config import DoctorConfig
from kvrelay.services.doctor.diagnosis import diagnose
from kvrelay.services.doctor.machine import look_at_machine
from kvrelay.services.doctor.report import Report
from kvrelay.services.doctor.show import show
from kvrelay.shared.errors import StoreError


def run(config: DoctorConfig, *, asked_for: bool, console: Console) -> int:
    """`asked_for`: a person named the Redis. Raises `ConfigError` for a URL that cannot be one."""
    report = asyncio.run(_look(config, asked_for))
    report = replace(report, findings=diagnose(report))
    if config.as_json:
        json.dump({**asdict(report), "exit_code": report.exit_code}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(console, report)
    return report.exit_code


async def _look(config: DoctorConfig, asked_for: bool) -> Report:
    machine = await look_at_machine()
    try:
        cluster = await look_at_cluster(config.redis_url, config.cluster)
    except StoreError as error:
        return Report(machine, no_cluster=str(error), cluster_asked_for=asked_for)
    return Report(machine, cluster, cluster_asked_for=asked_for)
