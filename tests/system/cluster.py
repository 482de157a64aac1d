"""Clusters for the system tests: a real redis-server and every part a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis
from pydantic import ByteSize
from tests.stack import START_S, Process, metrics, metrics_at, until

from kvrelay.services.deployment import child_env
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.valkey import free_port
from kvrelay.shared.config import Settings
from kvrelay.shared.lifeline import wrapped
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

PASSWORD = "sesame-7f3a9c"
HELD = (
    'kvrelay_pool_blocks{state="in_use"}',
    'kvrelay_pool_blocks{state="quarantined"}',
    "kvrelay_requests_waiting",
    "kvrelay_requests_running",
)


@dataclass(frozen=True)
class Place:
    """Something like a host: how a command is run in it, and the address others reach it under."""

    address: str = "127.0.0.1"
    entry: tuple[str, ...] = ()
    """What is put before a command. The process it starts must become the command."""
    own_network: bool = False

    @staticmethod
    def netns(name: str, address: str) -> Place:
        return Place(address, ("ip", "netns", "exec", name), own_network=True)

    def inside(self, command: Sequence[str]) -> list[str]:
        return [*self.entry, *command]


HERE = Place()


class RedisServer:
    """Debian's redis-server in memory, with a password, on a port of its own."""

    def __init__(self, folder: Path, place: Place = HERE) -> None:
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@{place.address}:{self.port}/0"
        self._config = folder / "redis.conf"
        self._config.write_text(
            f'bind {place.address}\nport {self.port}\nrequirepass {PASSWORD}\nsave ""\n'
            f"appendonly no\ndir {folder}\nlogfile {folder}/redis.log\ndaemonize no\n"
        )
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._popen = subprocess.Popen(wrapped(["redis-server", str(self._config)]))
        until(self.answers, START_S, "redis-server answers")

    def kill(self, number: signal.Signals) -> None:
        assert self._popen is not None
        self._popen.send_signal(number)

    def stop(self) -> None:
        if self._popen is not None:
            self._popen.send_signal(signal.SIGCONT)
            self._popen.terminate()
            self._popen.wait(10)
            self._popen = None

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=1)


class Cluster:
    """`workers` on one Redis behind one router. Parts are started in the order of `start`."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        server: RedisServer,
        env: Mapping[str, str] | None = None,
        router: Place = HERE,
    ) -> None:
        """`env` is added to the environment of all parts."""
        self.folder = folder
        self.server = server
        self.workers: list[Process] = []
        self._model = model
        self._environ = {**os.environ, **(env or {})}
        config = RouterConfig(
            port=free_port(),
            host=router.address,
            model=str(model),
            redis_url=server.url,
            route="split",
            log_level="debug",
        )
        self.model = config.served_names[0]
        self.url = f"http://{router.address}:{config.port}"
        self.router = self._part("router", "router", config, router)

    def add_worker(self, role: Role, name: str, place: Place = HERE, **settings: Any) -> Process:
        """A worker that is not started yet. In a network of its own it binds to all addresses."""
        if place.own_network:
            settings |= {"host": "0.0.0.0", "advertise_host": place.address}
        config = WorkerConfig(
            role=role,
            name=name,
            model=str(self._model),
            redis_url=self.server.url,
            threads=1,
            kv_cache_memory_bytes=ByteSize(16 << 20),
            log_level="debug",
            **settings,
        )
        worker = self._part(name, "decode" if role is Role.BOTH else role.value, config, place)
        self.workers.append(worker)
        return worker

    def _part(self, name: str, command: str, config: Settings, place: Place) -> Process:
        program = place.inside([sys.executable, "-m", "kvrelay.services.cli", command])
        return Process(name, program, child_env(config, self._environ), self.folder / f"{name}.log")

    @property
    def parts(self) -> list[Process]:
        return [*self.workers, self.router]

    def start(self) -> None:
        for part in self.parts:
            part.start(wait=False)
        self.wait_ready()

    def wait_ready(self) -> None:
        for part in self.parts:
            part.wait_ready()
        self.wait_all_seen()

    def wait_all_seen(self) -> float:
        """Until the router can use every worker; how long it took."""
        return until(self.all_seen, START_S, "the router sees all workers")

    def all_seen(self) -> bool:
        return self.ready() and self.seen() == len(self.workers)

    def seen(self) -> int:
        """How many workers the router can use."""
        page = metrics_at(f"{self.url}/metrics")
        return round(sum(value for name, value in page.items() if 'state="ready"' in name))

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).json()["status"] == "ready"
        except httpx.HTTPError:
            return False

    def baseline(self) -> bool:
        """Nothing is held, queued or running anywhere."""
        idle = not any(metrics(worker)[gauge] for worker in self.workers for gauge in HELD)
        return idle and metrics_at(f"{self.url}/metrics")["kvrelay_requests_in_flight"] == 0

    def stop(self) -> None:
        alive = [p for p in self.parts if p.popen is not None and p.popen.poll() is None]
        for part in alive:
            part.kill(signal.SIGCONT)
            part.kill(signal.SIGTERM)
        for part in alive:
            assert part.popen is not None
            part.popen.wait(15)

    def logs(self) -> str:
        return "".join(log.read_text() for log in sorted(self.folder.glob("*.log")))
