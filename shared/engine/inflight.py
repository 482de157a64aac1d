"""Prefix blocks that are being computed or relayed now, and the legs that wait for them.

A leg whose prompt shares a block with one that is on its way waits for it instead of computing it
again. It waits for the last block they share; when that was written, or its writer ends, the leg
goes back to its queue and looks again. A writer holds all the memory it needs and waits for nobody
here, so this wait ends when the writer does, at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.types import LegRef

if TYPE_CHECKING:
    from kvrelay.shared.engine.state import Leg


class Inflight:
    def __init__(self) -> None:
        self._writers: dict[BlockHash, Leg] = {}
        self._waiters: dict[BlockHash, dict[LegRef, Leg]] = {}

    def __len__(self) -> int:
        """Blocks on their way."""
        return len(self._writers)

    def announce(self, writer: Leg, blocks: Iterable[BlockHash]) -> None:
        """`writer` is going to write these; one that has a writer already keeps it."""
        for digest in blocks:
            self._writers.setdefault(digest, writer)

    def done(self, writer: Leg, blocks: Iterable[BlockHash]) -> list[Leg]:
        """Written, or given up: those of `writer` are off. Returns the legs that waited for one."""
        woken: list[Leg] = []
        for digest in blocks:
            if self._writers.get(digest) is writer:
                del self._writers[digest]
                woken += self._waiters.pop(digest, {}).values()
        for leg in woken:
            leg.awaits = None
        return woken

    def shared(self, blocks: Sequence[BlockHash]) -> int:
        """How many of the first `blocks` are on their way."""
        count = 0
        while count < len(blocks) and blocks[count] in self._writers:
            count += 1
        return count

    def park(self, leg: Leg, digest: BlockHash) -> None:
        """The leg waits for this block, which is on its way."""
        assert digest in self._writers and leg.awaits is None
        leg.awaits = digest
        self._waiters.setdefault(digest, {})[leg.ref] = leg

    def leave(self, leg: Leg) -> None:
        """The leg waits no more, if it did."""
        if leg.awaits is not None:
            waiters = self._waiters[leg.awaits]
            del waiters[leg.ref]
            if not waiters:
                del self._waiters[leg.awaits]
            leg.awaits = None

    def check(self, live: Iterable[Leg]) -> None:
        """Assert that who waits, waits for a block that somebody live writes."""
        known = {id(leg) for leg in live}
        assert self._waiters.keys() <= self._writers.keys(), "a leg waits for nobody"
        assert all(id(leg) in known for leg in self._writers.values()), "a writer is gone"
        waiting = [leg for legs in self._waiters.values() for leg in legs.values()]
        assert all(id(leg) in known and leg.awaits is not None for leg in waiting)
