"""A cluster on this machine that may be hurt: whatever ends is started again at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.services.deployment import Deployment, child_env, worker_configs
from kvrelay.services.supervisor import Part, PartSpec
from kvrelay.services.valkey import EmbeddedValkey, free_port, server_binary
from kvrelay.shared.chaos.plan import Action, ProcessAction
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.config import Settings
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.tasks import TaskSet
from kvrelay.shared.types import Role

PROGRAM = (sys.executable, "-m", "kvrelay.services.cli")
RETRY_S = 0.2
REFERENCE = "reference"
REDIS = "redis"


@dataclass(slots=True)
class Kept:
    """A part that is started again when it ends."""

    part: Part
    up: bool = False
    frozen: bool = False
    down_s: float = 0.0
    """How long it stays away the next time."""
    starts: int = 0
    disturbed: int = 0
    """How often something was done to it."""
    start_s: float = 0.0
    """What its last start took."""
    killed_ns: list[int] = field(default_factory=list)
    """When it was ended without a chance to end its work."""

    @property
    def name(self) -> str:
        return self.part.spec.name

    @property
    def hurtable(self) -> bool:
        return self.up and not self.frozen


class ChaosCluster:
    """Store, workers and router as `kvrelay up` runs them; and one unsplit worker behind a router
    of its own, without chaos, whose answers are the right ones."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.folder = folder
        self._up = deployment.up
        self._tasks = TaskSet()
        scratch = folder / "valkey"
        scratch.mkdir(parents=True, exist_ok=True)
        valkey = EmbeddedValkey(server_binary(), free_port(), scratch)
        self.redis = Kept(self._part(REDIS, REDIS, valkey.command, dict(os.environ), valkey))
        here = {"redis_url": valkey.url}
        self.audit = (
            *(*PROGRAM, "audit", "--json"),
            *("--redis", valkey.url, "--cluster", deployment.router.cluster),
        )
        """The command that finds what has no owner."""
        self.workers = [
            self._service(c.name, c.role.value, c.model_copy(update=here))
            for c in worker_configs(deployment)
        ]
        # A port of its own, so that clients find the router again after its restart.
        router = deployment.router.model_copy(update={**here, "port": free_port()})
        self.router = self._service("router", "router", router)
        self.url = ("127.0.0.1", router.port)
        self.model = router.served_names[0]
        calm = {**here, "cluster": REFERENCE, "chaos": "", "record": ""}
        alone = {**calm, "role": Role.BOTH, "name": REFERENCE}
        port = free_port()
        front = router.model_copy(update={**calm, "port": port})
        self._reference = [
            self._service(REFERENCE, "decode", deployment.worker.model_copy(update=alone)),
            self._service("reference-router", "router", front),
        ]
        self.reference_url = ("127.0.0.1", port)

    @property
    def parts(self) -> list[Kept]:
        return [self.redis, *self.workers, self.router]

    def _service(self, name: str, command: str, config: Settings) -> Kept:
        env = child_env(config, os.environ)
        return Kept(self._part(name, command, (*PROGRAM, command), env))

    def _part(
        self,
        name: str,
        role: str,
        command: tuple[str, ...],
        env: Mapping[str, str],
        valkey: EmbeddedValkey | None = None,
    ) -> Part:
        probe = valkey.probe if valkey else None
        log = self.folder / f"{name}.log"
        up = self._up
        spec = PartSpec(name, role, command, env, log, up.ready_s, up.grace_s, probe)
        return Part(spec, SystemClock())

    async def start(self) -> None:
        await self._start(self.redis)
        starting = [*self.workers, self.router, *self._reference]
        async with asyncio.TaskGroup() as group:
            for kept in starting:
                group.create_task(self._start(kept))

    async def keep(self) -> None:
        """From now on what ends is started again; the reference has done its work."""
        await asyncio.gather(*(kept.part.stop() for kept in reversed(self._reference)))
        for kept in self.parts:
            self._tasks.spawn(self._keep(kept))

    async def stop(self) -> None:
        await self._tasks.cancel()
        self.thaw()
        await self.router.part.stop()
        others = [*self.workers, *self._reference]
        await asyncio.gather(*(kept.part.stop() for kept in others))
        await self.redis.part.stop()

    def thaw(self) -> None:
        for kept in self.parts:
            if kept.frozen and kept.part.pid:
                kept.part.signal(signal.SIGCONT)
            kept.frozen = False

    async def _start(self, kept: Kept) -> None:
        begun_s = time.monotonic()
        await kept.part.start()
        kept.start_s = time.monotonic() - begun_s
        kept.up = True
        kept.starts += 1

    async def _keep(self, kept: Kept) -> None:
        while True:
            await kept.part.ended()
            kept.up = kept.frozen = False
            down_s, kept.down_s = kept.down_s, 0.0
            await asyncio.sleep(down_s)
            while not kept.up:
                try:
                    await self._start(kept)
                except KvrelayError:
                    await kept.part.stop()
                    await asyncio.sleep(RETRY_S)  # paced: its own log says why

    def matching(self, part: str) -> list[Kept]:
        """The parts that a plan means by a name."""
        groups = {"worker": self.workers}
        for role in Role:
            groups[role.value] = [k for k in self.workers if k.part.spec.role == role]
        return groups.get(part) or [k for k in self.parts if k.name == part]

    def hurt(self, kept: Kept, kind: Action, action: ProcessAction) -> None:
        """Do to a part what the plan says."""
        kept.down_s = action.down_s
        kept.disturbed += 1
        if kind is Action.STOP:
            kept.frozen = True
            kept.part.signal(signal.SIGSTOP)
            self._tasks.spawn(self._thaw_later(kept, kept.starts, action.for_s))
            return
        kept.up = False
        if kind is Action.KILL:
            kept.killed_ns.append(time.monotonic_ns())
            kept.part.signal(signal.SIGKILL)
        else:
            kept.part.signal(signal.SIGTERM)

    async def _thaw_later(self, kept: Kept, life: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if kept.frozen and kept.starts == life:
            with suppress(ProcessLookupError):
                kept.part.signal(signal.SIGCONT)
            kept.frozen = False

    async def all_up(self) -> None:
        while not all(kept.hurtable for kept in self.parts):  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.02)
