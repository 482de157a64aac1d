"""What this machine is and what it can do at most, with a given number of threads."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.services.bench.cases import Work

FAR_BYTES = 1 << 30
"""Beyond any cache that a few cores are given."""
PRODUCT_WIDTH = 2048
PASSES = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of a few passes each: a neighbour only ever takes."""

    read_gb_per_s: float
    """Summing a buffer of `FAR_BYTES`."""
    copy_gb_per_s: float
    """Bytes read plus bytes written, of half the buffer onto the other."""
    read_weights_gb_per_s: float
    """Summing a buffer as large as the weights: a large cache may hold part of them."""
    gflop_per_s: float
    """A square product in the benchmark's dtype by torch."""

    def least_ms(self, work: Work) -> float:
        """No step can be faster: all bytes move while all products are computed."""
        moved_s = (work.weight_bytes + work.kv_bytes) / self.best_read_gb_per_s / 1e9
        return 1e3 * max(moved_s, work.flops / self.gflop_per_s / 1e9)

    @property
    def best_read_gb_per_s(self) -> float:
        return max(self.read_gb_per_s, self.read_weights_gb_per_s)


def measure_limits(threads: int, dtype: torch.dtype, weight_bytes: int) -> Limits:
    """Takes some seconds and 1 GiB, and all `threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    far = torch.ones(FAR_BYTES // 8, dtype=torch.int64)
    half = len(far) // 2
    read_s = _best_s(lambda: far.sum())
    copy_s = _best_s(lambda: far[:half].copy_(far[half:]))
    weights = far[: max(1, weight_bytes // 8)]
    weights_s = _best_s(lambda: weights.sum())
    square = torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=dtype)
    product_s = _best_s(lambda: square @ square)
    torch.set_num_threads(before)
    return Limits(
        read_gb_per_s=FAR_BYTES / read_s / 1e9,
        copy_gb_per_s=FAR_BYTES / copy_s / 1e9,
        read_weights_gb_per_s=weights.nbytes / weights_s / 1e9,
        gflop_per_s=2 * PRODUCT_WIDTH**3 / product_s / 1e9,
    )


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(PASSES):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best


def describe(threads: int) -> dict[str, object]:
    """Processor, cores and memory, as the report names them."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": threads,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Linux names it in /proc; a virtual machine's name says little, so its features follow."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    values = dict(line.partition(":")[::2] for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in values.items()}
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    able = [name for name in wanted if name in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())} ({', '.join(able)})"
