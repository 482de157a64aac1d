"""What fixes the last bits of results: workers may continue each other only where it is equal."""

from __future__ import annotations

import torch

from kvrelay.kernels.linear.reference import ROW_TILE, onednn_runs

VERSION = 5
"""Raised whenever a kernel's results change in any bit."""


def numerics_id(dtype: torch.dtype) -> str:
    """Kernel variant and version here, like `torch-2.13.0 AVX512+amx onednn tile16 v1`."""
    cpu = torch.backends.cpu.get_cpu_capability()
    amx = "+amx" if torch.cpu._is_amx_tile_supported() else ""
    library = "onednn" if onednn_runs(dtype) else "aten"
    return f"torch-{torch.__version__} {cpu}{amx} {library} tile{ROW_TILE} v{VERSION}"
