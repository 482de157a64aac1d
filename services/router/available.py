"""Who could serve a request now, and how long it is worth to wait when there is nobody."""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol

from kvrelay.services.router import policy
from kvrelay.services.router.drains import Drains
from kvrelay.services.router.generation import Readiness
from kvrelay.services.router.links import CommandSink
from kvrelay.services.router.running import RunningRequest
from kvrelay.shared.errors import Unavailable

NOBODY_S: Final = 5.0
"""Workers that died are mostly back, or replaced, within this time: so long a request waits for
somebody who can serve it at all, rather than being refused at once."""


class Roster(Protocol):
    """Who is there to work (`Membership`, or a simulated one)."""

    def live(self) -> list[policy.LiveWorker]: ...
    def link(self, incarnation: str) -> CommandSink | None: ...
    async def wait_change(self) -> None: ...
    def look(self) -> None: ...


class Available:
    """One per router, on its event loop."""

    def __init__(self, roster: Roster, drains: Drains) -> None:
        self._roster = roster
        self._drains = drains
        self._since_s = -math.inf
        """When there last was somebody who could serve, in the loop's time."""

    def readiness(self) -> Readiness:
        return policy.readiness(self._staying())

    def candidates(self, running: RunningRequest, excluded: frozenset[str]) -> policy.Candidates:
        """All legs of a request, at every attempt, are computed by workers of one group."""
        usable = self._staying()
        found = policy.candidates(usable, excluded, running.group)
        if not found and running.group and running.untouched:
            found = policy.candidates(usable, excluded)
        return found

    def check(self) -> None:
        """Raises `Unavailable` when there is nobody, and has not been for a while."""
        if not self._somebody() and self._left_s() <= 0:
            raise Unavailable(self.readiness().missing)

    async def change(self, *, begun: bool) -> None:
        """Until the view may have changed. What no worker has `begun` is not kept for long: it
        raises `Unavailable` in the end."""
        try:
            async with asyncio.timeout(None if begun else self._left_s()):
                await self._roster.wait_change()
        except TimeoutError:
            self.check()

    def note(self) -> None:
        """Until now there was somebody."""
        self._since_s = asyncio.get_running_loop().time()

    def _staying(self) -> list[policy.LiveWorker]:
        return self._drains.staying(self._roster.live())

    def _somebody(self) -> bool:
        found = policy.candidates(self._staying(), frozenset())
        if found:
            self.note()
        return bool(found)

    def _left_s(self) -> float:
        return self._since_s + NOBODY_S - asyncio.get_running_loop().time()
