"""The settings of `kvrelay bench engine`; model, dtype, threads and pool are a worker's."""

from __future__ import annotations

from typing import Annotated, ClassVar, get_args

from pydantic import Field

from kvrelay.shared.config import Named, Names, Settings
from kvrelay.shared.worker.config import Kernels

WORKER_FIELDS = ("model", "dtype", "threads", "kernels", "kv_cache_memory_bytes")
"""What of a worker's settings is taken; all else is as in a worker that was told nothing."""
OUR_KERNELS = tuple(name for name in get_args(Kernels) if name != "auto")
PEERS = ("vllm", "llamacpp")


class BenchConfig(Settings):
    """What is measured, how long, and how it is shown."""

    table: ClassVar[str] = "bench"

    cases: Names = ()
    """Cases to measure, comma between: prefill_512, prefill_2048, decode_b1, decode_b4, decode_b8,
    decode_b16, decode_b32; unset is all of them."""
    peers: Annotated[Names, Named(setting="peer")] = ()
    """Engine to compare with, in the same run: vllm, llamacpp, or kvrelay itself with other kernels
    (reference, native-avx2, ...); may be given several times."""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 7
    """Rounds in which every system computes every case once, after a warm-up."""
    seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """No round begins that would probably end later than this; one is always measured."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of the prompts and of the order."""
    costs: bool = False
    """Also a table of decode steps by context and batch; what does not fit into the pool is left
    out, so give it a kv_cache_memory of some GiB."""
    as_json: Annotated[bool, Named(setting="json")] = False
    """JSON on stdout instead of tables."""
    plot: str = ""
    """File to write a picture to, as PNG."""
