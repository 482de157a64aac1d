"""A real cluster on this machine for tests: Valkey, workers and a router, each its own process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvrelay.services.deployment import child_env
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.valkey import EmbeddedValkey, free_port, server_binary
from kvrelay.shared.config import Settings
from kvrelay.shared.lifeline import READY_FD, wrapped
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

START_S = 60.0
HELD = (
    'kvrelay_pool_blocks{state="in_use"}',
    'kvrelay_pool_blocks{state="quarantined"}',
    "kvrelay_requests_waiting",
    "kvrelay_requests_running",
)


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for a condition of another process; returns how long it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - begun


@dataclass
class Process:
    """One part. `detail` is what it announced when it was ready."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def start(self, *, wait: bool = True) -> None:
        read_end, write_end = os.pipe()
        env = {**self.env, READY_FD: str(write_end)}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                wrapped(self.command), env=env, pass_fds=[write_end], stdout=log, stderr=log
            )
        os.close(write_end)
        self._ready_fd = read_end
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        ready, _, _ = select.select([self._ready_fd], [], [], START_S)
        line = os.read(self._ready_fd, 65536) if ready else b""
        os.close(self._ready_fd)
        if not line:
            raise AssertionError(f"did not start: {self.last_words()}")
        self.detail = json.loads(line)

    @property
    def dead(self) -> bool:
        """It was started, and has ended."""
        return self.popen is not None and self.popen.poll() is not None

    def last_words(self) -> str:
        """Its exit status and the end of its log, on a line for a summary."""
        assert self.popen is not None
        told = self.log.read_text(errors="replace").splitlines()[-8:]
        return f"{self.name} ended with {self.popen.poll()}: {' | '.join(told)}"

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Signal it and wait; the exit status."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.kill(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 10.0) -> int:
        """The exit status of a process that was told to end."""
        assert self.popen is not None
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"{self.name} did not end within {seconds:g} s") from None


class Stack:
    """`prefill` x `decode` workers, or with both 0 one worker that does both."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """Each setting goes to the router or to all workers. `env` is added to the environment."""
        self.folder = folder
        scratch = folder / "valkey"
        scratch.mkdir(parents=True)
        self._valkey = EmbeddedValkey(server_binary(), free_port(), scratch)
        self.redis_url = self._valkey.url
        self._environ = {**os.environ, **(env or {})}
        # One client for all: making one costs more than most requests do.
        self.http = httpx.Client(timeout=120, limits=httpx.Limits(), trust_env=False)
        self.valkey = Process(
            "valkey", list(self._valkey.command), self._environ, folder / "valkey.log"
        )
        drain = {k: settings[k] for k in ("drain_s",) if k in settings}  # of all parts
        router = {k: settings.pop(k) for k in [*settings] if k in RouterConfig.model_fields}
        router.setdefault("route", "split")  # what tests look at is the relay
        common: dict[str, Any] = {"redis_url": self.redis_url, "model": str(model)}
        log_level = router.pop("log_level", "info")
        self._router_settings = {"port": 0, "log_level": log_level, **common, **router}
        self.router = self._service("router", "router", RouterConfig(**self._router_settings))
        self._common = {**common, **settings, **drain}
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode or [Role.BOTH]
        self.workers = [self.make_worker(role, number) for number, role in enumerate(roles)]
        self.model = RouterConfig(port=0, **common, **router).served_names[0]

    def make_worker(self, role: Role, number: int, **changed: Any) -> Process:
        """A worker like the others but for the settings given; it is not started."""
        settings = {**self._common, **changed}
        config = WorkerConfig(role=role, name=f"{role}-{number}", **settings)
        command = "decode" if role is Role.BOTH else role.value
        return self._service(f"{role}-{number}", command, config)

    def _service(self, name: str, command: str, config: Settings) -> Process:
        program = [sys.executable, "-m", "kvrelay.services.cli", command]
        return Process(name, program, child_env(config, self._environ), self.folder / f"{name}.log")

    @contextmanager
    def behind(self, name: str, **changed: Any) -> Iterator[Stack]:
        """The same cluster behind one more router, with other settings."""
        config = RouterConfig(**{**self._router_settings, **changed})
        other = copy(self)
        other.router = self._service(name, "router", config)
        try:
            other.router.start()
            other.look_around()
            yield other
        finally:
            other.router.end()

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start all parts without waiting for them: several stacks can start side by side."""
        self.start_valkey()
        for part in (*self.workers, self.router):
            part.start(wait=False)

    def wait_ready(self) -> None:
        for part in (*self.workers, self.router):
            part.wait_ready()
        self.look_around()

    def look_around(self) -> None:
        """Until the router can serve and sees all."""
        self.url = f"http://{self.router.detail['address']}"
        self.admin = f"http://{self.router.detail.get('admin', self.router.detail['address'])}"
        until(self.ready, START_S, "the router is ready")
        until(self.all_seen, START_S, "the router sees all workers")

    def all_seen(self) -> bool:
        page = metrics_at(f"{self.admin}/metrics")
        seen = [value for name, value in page.items() if 'state="ready"' in name]
        return sum(seen) == len(self.workers)

    def start_valkey(self) -> None:
        with self.valkey.log.open("ab") as log:
            self.valkey.popen = subprocess.Popen(
                wrapped(self.valkey.command), stdout=log, stderr=log
            )
        until(self._valkey_answers, 10.0, "Valkey answers")

    def _valkey_answers(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self.redis_url, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def ready(self) -> bool:
        try:
            return bool(self.http.get(f"{self.url}/ready", timeout=2).json()["status"] == "ready")
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """Valkey last, so that the others can take their leave of it."""
        self.http.close()
        for parts in ((self.router, *self.workers), (self.valkey,)):
            running = [p for p in parts if p.popen is not None and p.popen.poll() is None]
            for part in running:
                part.kill(signal.SIGCONT)
                part.kill(signal.SIGTERM)
            for part in running:
                part.wait()

    # ---- what tests look at ------------------------------------------------------------------

    @property
    def prefills(self) -> list[Process]:
        return [worker for worker in self.workers if worker.name.startswith("prefill")]

    @property
    def decodes(self) -> list[Process]:
        return [worker for worker in self.workers if worker.name.startswith("decode")]

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"{self.url}{path}", json={"model": self.model, **body})

    def complete(self, prompt: object, **params: object) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **params)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def baseline(self) -> bool:
        """Nothing is held, queued or running anywhere."""
        return not any(self.held(worker) for worker in self.workers) and (
            metrics_at(f"{self.admin}/metrics")["kvrelay_requests_in_flight"] == 0
        )

    def held(self, worker: Process) -> float:
        """Blocks and requests that a worker has in its hands."""
        page = metrics(worker)
        return sum(page[gauge] for gauge in HELD)

    def counted(self, workers: Sequence[Process], sample: str) -> int:
        """One sample, summed over workers."""
        return round(sum(metrics(worker)[sample] for worker in workers))


def metrics(worker: Process) -> dict[str, float]:
    return metrics_at(f"http://{worker.detail['metrics']}/metrics")


def at_least(worker: Process, sample: str, value: float) -> Callable[[], bool]:
    """A condition for `until`."""
    return lambda: metrics(worker)[sample] >= value


def metrics_at(url: str) -> dict[str, float]:
    """Every sample of a Prometheus page, by its full name."""
    with urllib.request.urlopen(url, timeout=5) as page:
        lines = page.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@contextmanager
def running(folder: Path, model: Path, **shape: Any) -> Iterator[Stack]:
    stack = Stack(folder, model, **shape)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
