"""Performs the process actions of a plan while the load runs, and times who notices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.services.chaos.cluster import ChaosCluster, Kept
from kvrelay.services.chaos.watch import POLL_S, ready_workers
from kvrelay.shared.chaos.decide import fraction
from kvrelay.shared.chaos.plan import Action, ChaosPlan, ProcessAction

NOTICE_LIMIT_S = 5.0


@dataclass(slots=True)
class Hands:
    cluster: ChaosCluster
    plan: ChaosPlan
    seed: int
    progress: Callable[[], float]
    """Which part of the load is done."""
    done: Counter[str] = field(default_factory=Counter)
    """By action and part."""
    noticed_s: dict[str, list[float]] = field(default_factory=dict)
    """By action: from a worker's loss to the router's view without it."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number, action in enumerate(self.plan.processes):
                group.create_task(self._perform(number, action))

    async def _perform(self, number: int, action: ProcessAction) -> None:
        begun_s = time.monotonic()
        count = 0
        while action.limit is None or count < action.limit:
            if action.at_done:
                if count == len(action.at_done):
                    return
                while self.progress() < action.at_done[count]:  # noqa: ASYNC110 - a number
                    await asyncio.sleep(POLL_S)
            elif action.at_s:
                if count == len(action.at_s):
                    return
                await asyncio.sleep(max(0.0, begun_s + action.at_s[count] - time.monotonic()))
            else:
                await asyncio.sleep(self._period_s(action))
            count += 1
            victim = await self._victim(number, count, action)
            drawn = int(fraction(self.seed, "action", number, count) * len(action.action))
            kind = action.action[drawn]
            self.done[f"{kind} {victim.name}"] += 1
            await self._hurt(victim, kind, action)

    def _period_s(self, action: ProcessAction) -> float:
        if action.every_s is not None:
            return action.every_s
        assert action.every_restarts is not None
        return action.every_restarts * min(kept.start_s for kept in self.cluster.workers)

    async def _victim(self, number: int, count: int, action: ProcessAction) -> Kept:
        """One of those meant; it is whole when its turn comes, and not the last of its role."""
        group = self.cluster.matching(action.part)
        victim = group[int(fraction(self.seed, "victim", number, count) * len(group))]
        while not await self._spared(victim, action):  # noqa: ASYNC110 - processes
            await asyncio.sleep(POLL_S)
        return victim

    async def _spared(self, victim: Kept, action: ProcessAction) -> bool:
        """Whether it can be hurt now: its work can go on elsewhere, unless the plan says never
        mind."""
        if action.last or victim not in self.cluster.workers:
            return victim.hurtable
        role = victim.part.spec.role
        whole = sum(kept.hurtable for kept in self.cluster.matching(role))
        ready = await ready_workers(self.cluster, role)
        return victim.hurtable and min(whole, ready) > 1

    async def _hurt(self, victim: Kept, kind: Action, action: ProcessAction) -> None:
        watched = victim in self.cluster.workers and kind in (Action.KILL, Action.STOP)
        before = await ready_workers(self.cluster) if watched else 0
        self.cluster.hurt(victim, kind, action)
        if not watched or before == 0:
            return
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < NOTICE_LIMIT_S:
            seen = await ready_workers(self.cluster)
            if seen < before:
                took = self.noticed_s.setdefault(kind, [])
                took.append(time.monotonic() - begun_s)
                return
            if kind is Action.STOP and not victim.frozen:
                return  # it woke before anybody had to notice
            await asyncio.sleep(POLL_S)
