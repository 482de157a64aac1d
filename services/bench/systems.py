"""The systems that are compared: each a process of its own, of which one computes at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvrelay.services.bench.config import OUR_KERNELS, PEERS
from kvrelay.services.bench.drivers.serve import Reading
from kvrelay.services.bench.errors import BenchError
from kvrelay.shared.checkpoint.fetch import cache_dir

DRIVERS = Path(__file__).parent / "drivers"
LONGEST_ANSWER_S = 600.0
"""A system that says nothing for so long is stuck; loading takes the longest."""


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """How to start one system."""

    name: str
    python: Path
    driver: str
    settings: Mapping[str, object]
    environment: Mapping[str, str]


def peer_python(peer: str) -> Path:
    """The Python of the peer's environment. Raises `BenchError` when that was not set up."""
    if peer not in PEERS:
        raise BenchError(f"peer: {peer} is not one of {', '.join(PEERS + OUR_KERNELS)}")
    python = cache_dir() / "peers" / peer / "bin" / "python"
    if not python.exists():
        raise BenchError(
            f"peer: {peer} is not in {python.parent.parent}; `loadtests/peers/setup {peer}` gets it"
        )
    return python


def peer_environment(peer: str, threads: int) -> dict[str, str]:
    """vLLM takes its threads from the cores it is told to use, and its pool from a variable."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if peer != "vllm":
        return offline
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **offline,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class RunningSystem:
    """A system's process. Any end of it before `close` is a `BenchError` with its last words."""

    def __init__(self, spec: SystemSpec, log: Path) -> None:
        self.name = spec.name
        self._log = log
        command = [str(spec.python), str(DRIVERS / "serve.py"), str(DRIVERS / spec.driver)]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(spec.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **spec.environment},
            )
        self.about: dict[str, Any] = {}

    def load(self) -> None:
        """Wait until it has loaded the model; then `about` says what it is."""
        self.about = self._answer()

    def measure(self, prompts: Sequence[Sequence[int]], steps: int) -> Reading:
        return Reading(**self.ask("measure", prompts=prompts, steps=steps))

    def ask(self, call: str, **given: object) -> dict[str, Any]:
        line = json.dumps({"call": call, "with": given}) + "\n"
        try:
            self._pipe(self._process.stdin).write(line.encode())
            self._pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> None:
        """It ends when it has nothing more to read. Idempotent."""
        try:
            self._pipe(self._process.stdin).close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "asked for in Popen"
        return pipe

    def _answer(self) -> dict[str, Any]:
        pipe = self._pipe(self._process.stdout)
        if not select.select([pipe], [], [], LONGEST_ANSWER_S)[0]:
            raise BenchError(f"{self.name}: no answer in {LONGEST_ANSWER_S:.0f} s; see {self._log}")
        if not (line := pipe.readline()):
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> BenchError:
        status = self._process.wait()
        words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = words[-1].strip() if words else "it said nothing"
        return BenchError(f"{self.name} ended with status {status}: {last} (log: {self._log})")


@contextmanager
def running(specs: Sequence[SystemSpec], logs: Path) -> Iterator[list[RunningSystem]]:
    """Start all at once, so that they load side by side; whatever happens, none is left behind."""
    systems: list[RunningSystem] = []
    try:
        for spec in specs:
            systems.append(RunningSystem(spec, logs / f"bench-{spec.name}.log"))
        yield systems
    finally:
        for system in systems:
            system.close()


def kvrelay_spec(name: str, settings: Mapping[str, object]) -> SystemSpec:
    return SystemSpec(name, Path(sys.executable), "kvrelay_driver.py", settings, {})
