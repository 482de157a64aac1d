"""The settings of a worker, in any role."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, ByteSize, Field, model_validator

from kvrelay.shared.config import (
    ClusterName,
    Host,
    LogFormat,
    LogLevel,
    Named,
    Port,
    RedisUrl,
    Settings,
)
from kvrelay.shared.ports import is_wildcard
from kvrelay.shared.types import Role
from kvrelay.shared.worker.affinity import parse_cpus

Kernels = Literal[
    "auto", "native-amx", "native-avx512bf16", "native-avx2", "native-portable", "reference"
]


def _cpus(text: str) -> str:
    parse_cpus(text)
    return text


BESIDE_STREAMS: Final = 128


class WorkerConfig(Settings):
    """One frozen object per worker process; units are in the names."""

    table: ClassVar[str] = "worker"

    role: Role = Role.BOTH
    """What the worker does with a request: prefill, decode or both."""
    model: str
    """A GGUF file, a Hugging Face folder, or a hub id."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and of the KV memory."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block; the same on all workers of a group."""
    max_model_len: Annotated[int | None, Field(ge=2)] = None
    """Longest prompt plus answer in tokens; unset means what the model and the KV memory allow."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most requests in one step."""
    max_num_batched_tokens: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """Most tokens in one step; longer prompts are computed in chunks. Unset means 512 of a prefill
    worker, which nobody's next token waits for, and 256 of others; a decode worker whose
    streams go on meanwhile takes 128."""
    target_step_ms: Annotated[int, Field(ge=1, le=10_000)] = 200
    """How long a step should last at most where prompts are computed, in milliseconds: a chunk is
    made as small as that needs, down to one block. It bounds the gap between a stream's tokens."""
    shared_duty: Annotated[float, Field(ge=0.05, le=1.0)] = 1.0
    """Of a decode worker: which part of one processor's time it computes, on one thread, while
    prompts are computed for it on the same processors, but two steps in `target_step_ms` and ten in
    a second at least. `kvrelay up` sets it, where workers share them; 1 is for workers with
    processors of their own."""
    scheduling_policy: Literal["fcfs", "priority", "shortest-uncached-first"] = "fcfs"
    """Which waiting request starts first; each policy lets what waits long enough go before."""
    kv_cache_memory_bytes: Annotated[
        ByteSize, Field(ge=1 << 20), Named(setting="kv_cache_memory")
    ] = ByteSize(512 << 20)
    """Memory for KV blocks in bytes, taken at the start; 512MiB and 2GiB are understood."""
    threads: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Compute threads; unset means every core that the process may use."""
    cpu_affinity: Annotated[str, AfterValidator(_cpus)] = ""
    """CPUs that the worker's threads run on, like 0-1,4; empty means all that it may use."""
    kernels: Kernels = "auto"
    """What computes: auto takes the fastest native variant that is built and that this processor
    can run, else the torch reference; a variant taken by name is an error where it cannot run."""
    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The cluster's Redis. Give one with a password by environment or file, not by flag."""
    cluster: ClusterName = "kvrelay"
    """Name of the cluster: several can share one Redis."""
    host: Annotated[Host, Named(env="BIND_HOST")] = "127.0.0.1"
    """Address that the worker's ports bind to."""
    advertise_host: Host | None = None
    """Address under which others reach this worker; unset means `host`, if that is no wildcard."""
    port: Annotated[Port, Named(env="RPC_PORT")] = 0
    """gRPC port; 0 takes a free one."""
    metrics_port: Port = 0
    """HTTP port of /metrics, /health and /ready; 0 takes a free one."""
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    """What carries KV blocks; auto takes ucx where it can be used, else tcp, and says which."""
    name: Annotated[str, Field(max_length=64), Named(env="WORKER_NAME")] = ""
    """A label for people, in logs and metrics."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """After SIGTERM running answers have this many seconds to end, or to move to other workers."""
    vllm_metric_names: bool = True
    """Tell on /metrics what vLLM also has by vLLM's names too, for autoscalers made for those."""
    log_format: LogFormat = "auto"
    """One JSON object a line, or one line of text; auto is text on a terminal and else json."""
    log_level: LogLevel = "info"
    """Least severe message that is logged."""
    chaos: str = ""
    """A chaos plan (YAML file): faults that this worker injects into its own work, to prove that
    nothing comes of them. Empty is none; never set it where people are served."""
    record: str = ""
    """Folder to write a record of the engine's every decision to, for `kvrelay replay`; empty is
    none. A record holds the token ids of all prompts and answers: what people wrote."""
    record_limit_bytes: Annotated[ByteSize, Field(ge=1 << 16), Named(setting="record_limit")] = (
        ByteSize(256 << 20)
    )
    """Size in bytes at which a record ends; serving goes on."""

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, or what it is when unset."""
        return self.max_num_batched_tokens or (512 if self.role is Role.PREFILL else 256)

    @property
    def tokens_beside_streams(self) -> int:
        """Most work on prompts in a step that streams wait for, in tokens that have nobody before
        them: less of a decode worker, as it is there for them. On two cores, 4 streams' largest gap
        beside prompts of 2,000 tokens is 90 ms with 256 and 63 with 128; those take 778 and
        1,020 ms."""
        if self.role is Role.DECODE and self.max_num_batched_tokens is None:
            return BESIDE_STREAMS
        return self.step_tokens

    @model_validator(mode="after")
    def _reachable(self) -> WorkerConfig:
        if self.advertise_host is None and is_wildcard(self.host):
            raise ValueError(
                f"advertise_host is required when host is the wildcard {self.host!r}: "
                "others cannot reach a worker under it"
            )
        if self.advertise_host is not None and is_wildcard(self.advertise_host):
            raise ValueError(f"advertise_host is the wildcard {self.advertise_host!r}")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> WorkerConfig:
        if self.port and self.port == self.metrics_port:
            raise ValueError(f"port and metrics_port are both {self.port}: they must differ")
        return self

    @property
    def advertised_host(self) -> str:
        """What goes into the registration record; never a wildcard."""
        return self.advertise_host or self.host

    @property
    def compute_threads(self) -> int:
        """`threads`, or the number of cores that this process may use."""
        if self.threads is not None:
            return self.threads
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
