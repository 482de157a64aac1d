"""The block pool of one worker.

Law (L4), after every call:  free + cached_idle + in_use + quarantined == total.

- free: holds nothing anyone could want.
- cached_idle: nobody's, but its content is a known prefix; evicted least recently used first.
- in_use: held by at least one lease and readable.
- quarantined: held by one lease and being written by a peer; nobody may read it until `publish`.

A block is named when what the name says was written, keeps the name until it is evicted, and no
two blocks have the same name. Whoever holds a named block holds the named blocks before it too, and
lets go of the last one first: so the least recently used idle block never has a child, and a prefix
is evicted from its end.
The pool is plain bookkeeping: it never touches the memory it describes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.shared.kv.index import Name, PrefixIndex
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
        self._index = PrefixIndex()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that an allocation could have now: free ones and idle cached ones."""
        return len(self._free) + len(self._idle)

    def counts(self) -> PoolCounts:
        free, idle, quarantined = len(self._free), len(self._idle), len(self._quarantined)
        held = self.total - free - idle
        return PoolCounts(self.total, free, idle, held - quarantined, quarantined)

    def holders(self) -> dict[BlockId, int]:
        """How many hold each block that is held. O(total): for tests and audits."""
        return {BlockId(block): refs for block, refs in enumerate(self._refs) if refs}

    def watch(self) -> deque[BlockHash]:
        """From now on the digests of full blocks that were named or lost their name, as it happens.

        For one reader of any thread, who takes them from the left and asks `holds` what became of
        each: every change comes after it was made.
        """
        self._index.touched = deque()
        return self._index.touched

    def holds(self, digest: BlockHash) -> bool:
        """Whether the full block that ends this prefix is here. May be asked from any thread."""
        return self._index.find(digest) is not None

    def digests(self) -> frozenset[BlockHash]:
        """Of all full blocks that are here. O(total): for tests and audits."""
        return self._index.digests()

    def lookup(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The cached blocks of the longest known prefix, not yet held: `share` them at once."""
        found: list[BlockId] = []
        for digest in hashes:
            block = self._index.find(digest)
            if block is None:
                break
            found.append(BlockId(block))
        return found

    def lookup_part(self, parent: BlockHash, tokens: Sequence[int]) -> tuple[BlockId | None, int]:
        """The block after `parent` that begins with most of `tokens`, and how many: to copy from.

        Not yet held: `share` it until the copy is made.
        """
        block, count = self._index.longest(parent, tokens)
        return (BlockId(block), count) if count else (None, 0)

    def idle_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` sharing would take out of `available`."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more holder for each block; they were just looked up."""
        for block in blocks:
            assert block in self._index, f"block {block} is not a cached prefix"
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

    def register(self, block: BlockId, name: Name) -> BlockId:
        """Name a readable block. Returns the block to hold from now on.

        That is another one when a block of this name is there already: the caller's hold has moved
        to it and `block` is free. A tail that says no more than a known block stays without a name.
        """
        assert self._refs[block] > 0 and block not in self._quarantined
        if name.digest is not None and (stored := self._index.find(name.digest)) is not None:
            self.share([BlockId(stored)])
            self.release([block])
            return BlockId(stored)
        known = self._index.longest(name.parent, name.tokens)[1]
        if name.digest is None and known == len(name.tokens):
            return block
        self._drop_shorter(name)
        self._index.add(block, name)
        return block

    def _drop_shorter(self, name: Name) -> None:
        tail = self._index.shorter(name)
        if tail is not None and tail in self._idle:
            del self._idle[tail]
            self._index.remove(tail)
            heapq.heappush(self._free, tail)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One holder less; freed last to first, so that a tail is evicted before its head."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            self._quarantined.discard(block)
            if block in self._index:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self.evictions += 1
        self._index.remove(block)
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
        named = {block for block in range(self.total) if block in self._index}
        assert len(named) == len(self._index), "a name for a block that does not exist"
        assert idle <= named, "an idle cached block has no name"
        assert not free & named, "a free block has a name"
        assert not self._quarantined & named, "a quarantined block has a name"
        self._index.check()
        self._check_order(named)

    def _check_order(self, named: set[int]) -> None:
        """Every named block's parent outlives it."""
        age = {block: position for position, block in enumerate(self._idle)}
        for block in named:
            parent = self._index.find(self._index.name(block).parent)
            if parent is None:
                continue
            if self._refs[block] > 0:
                assert self._refs[parent] > 0, f"block {block} is held without its parent {parent}"
            elif self._refs[parent] == 0:
                assert age[block] < age[parent], f"block {parent} goes before its child {block}"
