"""What a router's own legs left at workers a moment ago, before the block directory tells of it.

The next turn of a conversation may come within milliseconds of an answer's end. What is noted here
holds for about as long as the directory may be late; then the directory is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvrelay.shared.kv.prefix import BlockHash

DIRECTORY_AGE_NS: Final = 1_000_000_000


class RecentBlocks:
    """By incarnation. Calls carry the time, monotonic."""

    def __init__(self) -> None:
        self._until_ns: dict[tuple[str, BlockHash], int] = {}
        self._notes: deque[tuple[int, list[tuple[str, BlockHash]]]] = deque()

    def note(self, worker: str, hashes: Iterable[BlockHash], now_ns: int) -> None:
        """The worker has just computed or received these blocks."""
        self._forget(now_ns)
        until_ns = now_ns + DIRECTORY_AGE_NS
        keys = [(worker, digest) for digest in hashes]
        self._until_ns |= dict.fromkeys(keys, until_ns)
        self._notes.append((until_ns, keys))

    def added_to(
        self,
        held: Mapping[str, int],
        workers: Iterable[str],
        hashes: Sequence[BlockHash],
        now_ns: int,
    ) -> dict[str, int]:
        """Blocks held of this chain: what the directory knows, and what comes right after it."""
        self._forget(now_ns)
        counts = {}
        for worker in workers:
            count = held.get(worker, 0)
            while count < len(hashes) and (worker, hashes[count]) in self._until_ns:
                count += 1
            counts[worker] = count
        return counts

    def _forget(self, now_ns: int) -> None:
        while self._notes and self._notes[0][0] <= now_ns:
            until_ns, keys = self._notes.popleft()
            for key in keys:
                if self._until_ns.get(key) == until_ns:
                    del self._until_ns[key]
