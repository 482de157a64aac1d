"""Which CPUs a worker's threads run on."""

from __future__ import annotations

import os
import re
from collections.abc import Set

from kvrelay.shared.errors import ConfigError

MOST_CPU = 4095
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cpus(text: str) -> frozenset[int]:
    """`0-1,4` -> {0, 1, 4}; empty for an empty text. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _RANGE.fullmatch(part)
        first = int(found[1]) if found else 0
        last = int(found[2] or first) if found else -1
        if not first <= last <= MOST_CPU:
            raise ValueError(
                f"{part!r} is neither a CPU nor a range like 0-3 (CPUs are 0 to {MOST_CPU})"
            )
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def check_cpus(cpus: Set[int]) -> None:
    """Raise `ConfigError` for a CPU that this process may not use."""
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cpu_affinity: this system cannot keep a process on chosen CPUs")
    allowed = os.sched_getaffinity(0)
    if missing := sorted(cpus - allowed):
        usable = ",".join(map(str, sorted(allowed)))
        raise ConfigError(f"cpu_affinity: CPU {missing[0]} is not one of those usable: {usable}")


def apply_affinity(cpus: Set[int]) -> None:
    """Keep this process, and all threads it starts from now on, on these CPUs; none means any.

    Raises `ConfigError` for a CPU that this process may not use.
    """
    check_cpus(cpus)
    if cpus:
        os.sched_setaffinity(0, cpus)
