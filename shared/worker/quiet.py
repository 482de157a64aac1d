"""Has the engine look, now and then, whether attempts wait for something that was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvrelay.shared.engine.messages import Look

LOOK_S: Final = 5.0
"""Between two looks; what passed beyond two of them did not pass in listening."""


class QuietWatch:
    """Of one incarnation, on its event loop. At rest nothing wakes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        legs: Callable[[], int],
        post: Callable[[Look], None],
    ) -> None:
        """`legs`: how many attempts are here."""
        self._loop = loop
        self._legs = legs
        self._post = post
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = 0.0

    def begin(self) -> None:
        """An attempt came. Idempotent."""
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._looked_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        passed_s = min(self._loop.time() - self._looked_s, 2 * LOOK_S)
        self._timer = None
        if self._legs():
            self._post(Look(round(passed_s * 1e3)))
            self._arm()
