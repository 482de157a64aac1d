"""The block pool of one worker.

Law (L4), after every call:  free + cached_idle + in_use + quarantined == total.

- free: holds nothing anyone could want.
- cached_idle: nobody's, but its content is a known prefix; evicted least recently used first.
- in_use: held by at least one lease and readable.
- quarantined: held by one lease and being written by a peer; nobody may read it until `publish`.

A block's hash is set once, when its last slot was written, and dropped when it is evicted.
The pool is plain bookkeeping: it never touches the memory it describes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.shared.kv.prefix import BlockHash
from kvrelay.shared.types import BlockId


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many blocks are in each state; the four states add up to `total`."""

    total: int
    free: int
    cached_idle: int
    in_use: int
    quarantined: int


class BlockPool:
    """Fixed number of blocks, reference counted; allocation is all or nothing."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self._free = list(range(total))  # a heap: lowest ids first keeps runs adjacent
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * total
        self._quarantined: set[int] = set()
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def available(self) -> int:
        """Blocks that an allocation could have now: free ones and idle cached ones."""
        return len(self._free) + len(self._idle)

    def counts(self) -> PoolCounts:
        free, idle, quarantined = len(self._free), len(self._idle), len(self._quarantined)
        held = self.total - free - idle
        return PoolCounts(self.total, free, idle, held - quarantined, quarantined)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The cached blocks of the longest known prefix, not yet held: `share` them at once."""
        found: list[BlockId] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(BlockId(block))
        return found

    def idle_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` sharing would take out of `available`."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more holder for each block; they were just looked up."""
        for block in blocks:
            assert block in self._hash_of, f"block {block} is not a cached prefix"
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def allocate(self, count: int, *, quarantined: bool = False) -> list[BlockId] | None:
        """`count` blocks with one holder each, or None and no change when there are not as many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        blocks = [BlockId(heapq.heappop(self._free)) for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        if quarantined:
            self._quarantined.update(blocks)
        return blocks

    def publish(self, blocks: Iterable[BlockId]) -> None:
        """Everything arrived and checked out: the blocks become readable."""
        for block in blocks:
            self._quarantined.remove(block)

    def register(self, block: BlockId, digest: BlockHash) -> None:
        """Name a full, readable block. Equal content that already has a block keeps that one."""
        assert self._refs[block] > 0 and block not in self._quarantined
        if digest in self._by_hash:
            return
        assert block not in self._hash_of, f"block {block} has a name already"
        self._hash_of[block] = digest
        self._by_hash[digest] = block

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One holder less; freed last to first, so that a tail is evicted before its head."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            self._quarantined.discard(block)
            if block in self._hash_of:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        del self._by_hash[self._hash_of.pop(block)]
        heapq.heappush(self._free, block)

    def check(self) -> None:
        """Assert the law and every cross-link. O(total): for tests and audits."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & held or idle & held), "a block is in two states"
        assert len(free) + len(idle) + len(held) == self.total, "a block is in no state"
        assert self._quarantined <= held, "a quarantined block has no holder"
        assert min(self._refs) >= 0, "negative reference count"
        assert idle <= self._hash_of.keys(), "an idle cached block has no name"
        assert not (free & self._hash_of.keys()), "a free block has a name"
        assert not (self._quarantined & self._hash_of.keys()), "a quarantined block has a name"
        assert {digest: block for block, digest in self._hash_of.items()} == self._by_hash
