"""Which blocks hold which prefixes: found by digest, or token by token below a known prefix.

A name is a block's place in the tree of prefixes: the digest of all blocks before it, and its own
tokens. A full block has a digest too, so that a whole prefix is found block by block; a tail, which
is not full, can only be found below its parent and copied from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvrelay.shared.kv.prefix import BlockHash


@dataclass(frozen=True, slots=True)
class Name:
    """What a block holds."""

    parent: BlockHash
    """Digest of everything before the block; the chain's root for a first block."""
    tokens: tuple[int, ...]
    digest: BlockHash | None = None
    """Of everything up to the block's end; None for a tail."""


class PrefixIndex:
    """At most one block for each name, and one name for each block."""

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}
        self._by_digest: dict[BlockHash, int] = {}
        # Sorted by tokens: the neighbours of a text are those that share most of it.
        self._below: dict[BlockHash, list[tuple[tuple[int, ...], int]]] = {}
        self.touched: deque[BlockHash] | None = None
        """Digests right after they came or went; None while nobody watches."""

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    def name(self, block: int) -> Name:
        return self._names[block]

    def find(self, digest: BlockHash) -> int | None:
        """The full block that ends this prefix."""
        return self._by_digest.get(digest)

    def digests(self) -> frozenset[BlockHash]:
        return frozenset(self._by_digest)

    def add(self, block: int, name: Name) -> None:
        """The name must be new, and the block without one."""
        assert block not in self._names, f"block {block} has a name already"
        self._names[block] = name
        if name.digest is not None:
            assert name.digest not in self._by_digest
            self._by_digest[name.digest] = block
            if self.touched is not None:
                self.touched.append(name.digest)
        siblings = self._below.setdefault(name.parent, [])
        siblings.insert(bisect_left(siblings, (name.tokens, block)), (name.tokens, block))

    def remove(self, block: int) -> None:
        name = self._names.pop(block)
        if name.digest is not None:
            del self._by_digest[name.digest]
            if self.touched is not None:
                self.touched.append(name.digest)
        siblings = self._below[name.parent]
        del siblings[bisect_left(siblings, (name.tokens, block))]
        if not siblings:
            del self._below[name.parent]

    def longest(self, parent: BlockHash, tokens: Sequence[int]) -> tuple[int, int]:
        """The block below `parent` that begins with most of `tokens`, and how many; (-1, 0)."""
        siblings = self._below.get(parent)
        if not siblings:
            return -1, 0
        wanted = tuple(tokens)
        at = bisect_left(siblings, (wanted, -1))
        best = (-1, 0)
        for text, block in siblings[max(at - 1, 0) : at + 1]:
            count = shared_tokens(text, wanted)
            if count > best[1]:
                best = (block, count)
        return best

    def shorter(self, name: Name) -> int | None:
        """A tail that says no more than `name` would: its tokens are the beginning of these."""
        siblings = self._below.get(name.parent, [])
        at = bisect_left(siblings, (name.tokens, -1)) - 1
        if at < 0:
            return None
        text, block = siblings[at]
        return block if name.tokens[: len(text)] == text else None

    def check(self) -> None:
        """Assert that the three views agree and that no prefix lost its beginning. O(size)."""
        names = self._names
        digests = {name.digest: block for block, name in names.items() if name.digest is not None}
        assert digests == self._by_digest
        below = sorted((n.parent, n.tokens, block) for block, n in names.items())
        assert below == sorted((p, *it) for p, items in self._below.items() for it in items)
        assert all(items == sorted(items) and items for items in self._below.values())
        assert len({(n.parent, n.tokens) for n in names.values()}) == len(names), "equal blocks"


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
