"""`kvrelay up`: every part a process of its own on this machine, started and stopped together.

store (embedded Valkey, unless --redis)  ->  workers and router  ->  ready, printed
(a part that dies is started again)          Ctrl-C or SIGTERM: router, workers, store
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from rich.console import Console

from kvrelay.services.console import show_parts, show_ready
from kvrelay.services.deployment import Deployment, child_env, worker_configs
from kvrelay.services.local import announce, run_folder, withdraw
from kvrelay.services.supervisor import Part, PartFailed, PartSpec
from kvrelay.services.valkey import EmbeddedValkey, free_port, server_binary
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.config import Settings
from kvrelay.shared.ports import authority, check_listen, is_wildcard
from kvrelay.shared.store.connection import check_store
from kvrelay.shared.types import Role

DRAIN_S = 2.0
"""A person who pressed Ctrl-C waits this long at most for running answers."""
SAME_SIGNAL_S = 0.3
"""A signal so soon after the first is its echo: some callers signal the process and its group."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVICE_PROGRAM = (sys.executable, "-m", "kvrelay.services.cli")
"""Run with `router`, `prefill` or `decode` behind it."""


def run(
    deployment: Deployment, console: Console, program: tuple[str, ...] = SERVICE_PROGRAM
) -> int:
    """Run all parts until SIGINT, SIGTERM or SIGHUP; 0 after an orderly end.

    Raises `ConfigError` before anything is started when a setting cannot work, and the first
    `KvrelayError` of a part that does not get ready.
    """
    check_listen(deployment.router.host, deployment.router.port)
    if deployment.external_redis:
        check_store(deployment.router.redis_url)
    status = asyncio.run(_Run(deployment, console, program).until_stopped())
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # all is stopped: one more would spoil the end
    return status


class _Run:
    """One run from start to stop."""

    def __init__(self, deployment: Deployment, console: Console, program: tuple[str, ...]) -> None:
        self._console = console
        self._program = program
        self._up = deployment.up
        folder = run_folder()
        self._logs = None if deployment.up.verbose else folder
        redis_url = deployment.worker.redis_url
        self._store: Part | None = None
        if not deployment.external_redis:
            valkey = EmbeddedValkey(server_binary(), free_port(), folder)
            redis_url = valkey.url
            self._store = self._part("valkey", "store", valkey.command, dict(os.environ), valkey)
        self._announce = partial(announce, folder, redis_url, deployment.router.cluster)
        self._folder = folder
        own = {"redis_url": redis_url, "drain_s": min(deployment.router.drain_s, DRAIN_S)}
        self._workers = [
            self._service(c.name, c.role.value, c.model_copy(update=own))
            for c in worker_configs(deployment)
        ]
        self._router_config = deployment.router.model_copy(update=own)
        self._router = self._service("router", "router", self._router_config)

    @property
    def _parts(self) -> list[Part]:
        return [*([self._store] if self._store else []), *self._workers, self._router]

    def _service(self, name: str, role: str, config: Settings) -> Part:
        command = "decode" if role == Role.BOTH else role
        env = child_env(config, os.environ)
        return self._part(name, role, (*self._program, command), env)

    def _part(
        self,
        name: str,
        role: str,
        command: tuple[str, ...],
        env: Mapping[str, str],
        valkey: EmbeddedValkey | None = None,
    ) -> Part:
        spec = PartSpec(
            name=name,
            role=role,
            command=command,
            env=env,
            log=self._logs / f"{name}.log" if self._logs else None,
            ready_s=self._up.ready_s,
            grace_s=self._up.grace_s,
            probe=valkey.probe if valkey else None,
        )
        return Part(spec, SystemClock())

    async def until_stopped(self) -> int:
        """Start, print, keep running; the first signal stops in order, the next one at once."""
        running = asyncio.create_task(self._serve())
        loop = asyncio.get_running_loop()
        first_s: float | None = None

        def on_signal() -> None:
            nonlocal first_s
            if first_s is None:
                first_s = loop.time()
                running.cancel()
            elif loop.time() - first_s > SAME_SIGNAL_S:
                self._say("stopping now")
                for part in self._parts:
                    part.kill()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal)
        with suppress(asyncio.CancelledError):
            await running
        return 0

    async def _serve(self) -> None:
        started = time.monotonic()
        try:
            await self._start()
            address = await self._answering()
            with self._heard():
                show_parts(self._console, self._parts)
                took_s = time.monotonic() - started
                show_ready(self._console, address, self._router_config.served_names[0], took_s)
            self._say(f"Logs: {self._logs}" if self._logs else "")
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(part.keep(self._report))
        finally:
            self._say("stopping ...")
            await self._stop()
            self._say("stopped")

    async def _start(self) -> None:
        self._say(f"starting {', '.join(p.spec.name for p in self._parts)} ...")
        if self._store:
            await self._store.start()
        self._announce()
        starts = [asyncio.create_task(p.start()) for p in (*self._workers, self._router)]
        try:
            for start in asyncio.as_completed(starts):
                await start
        finally:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _answering(self) -> str:
        """The router's URL once `/ready` says so: it has found workers of all kinds."""
        address = str(self._router.detail["address"]).removeprefix("http://").rstrip("/")
        host, _, port = address.rpartition(":")
        host = "127.0.0.1" if is_wildcard(host) else host.strip("[]")
        said = {"reason": "no answer"}
        try:
            async with asyncio.timeout(self._up.ready_s):
                while said.get("status") != "ready":
                    await asyncio.sleep(0.05)
                    said = await _get_json(host, int(port), "/ready") or said
        except TimeoutError:
            logs = f"; the logs are in {self._logs}" if self._logs else ""
            raise PartFailed(f"the router did not get ready: {said['reason']}{logs}") from None
        return f"http://{authority(host, int(port))}"

    async def _stop(self) -> None:
        """The router first, so that it can end its answers; the store last, for the leases."""
        await self._router.stop()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        withdraw(self._folder)
        if self._store:
            await self._store.stop()

    def _report(self, line: str) -> None:
        self._say(f"{time.strftime('%H:%M:%S')} {line}")

    def _say(self, line: str) -> None:
        with self._heard():
            self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Print in here. A closed terminal or pipe ends the talking, and nothing else."""
        try:
            yield
        except OSError:
            with open(os.devnull, "w") as nobody:
                os.dup2(nobody.fileno(), self._console.file.fileno())


async def _get_json(host: str, port: int, path: str) -> dict[str, str] | None:
    """The object in the answer's body; None when there is no answer."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return None
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: up\r\nConnection: close\r\n\r\n".encode())
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except OSError:
        return None
    finally:
        writer.close()
    found: dict[str, str] | None = json.loads(body) if body else None
    return found
