"""What a worker tells of the prefix blocks it holds, and what others make of that. Pure.

A worker numbers its batches of changes 1, 2, 3, ...; each follows from the one before it. Now and
then all that is held goes with a batch, as a snapshot, and the older batches are dropped.

    worker   Publication   digests that came or went -> batches, snapshots
    router   Replica       batches, whichever reach it, and snapshots -> the same set

Whoever finds that a batch is missing needs the snapshot, and goes on with the batches behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvrelay.shared.kv.prefix import BlockHash

SMALL: Final = 1_024
"""Digests (16 KiB) below which no snapshot is written to save room."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes of what one worker holds. No digest is in both lists."""

    seq: int
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    whole: bool = False
    """Tells no changes, follows from nothing: what is held then is in the snapshot."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is held after batch `seq`."""

    seq: int
    held: frozenset[BlockHash]


class Publication:
    """What one incarnation has told, and so what it has to tell next."""

    def __init__(self, holds: Callable[[BlockHash], bool]) -> None:
        self._holds = holds
        self._told: set[BlockHash] = set()
        self._seq = 0
        self._logged = 0
        """Changes in the batches since the snapshot, its own included."""
        self._whole = False

    def next(self, touched: Iterable[BlockHash]) -> tuple[Batch, Snapshot | None] | None:
        """What to write now that `touched` came or went; None when nothing is new.

        It counts as told: call `lost` when it was not written, or perhaps not. A batch of more
        changes than blocks are held is replaced by the snapshot, and when the batches since the
        last one have become longer than a snapshot, one goes with this: so what is kept is at most
        about twice what is held.
        """
        added: list[BlockHash] = []
        removed: list[BlockHash] = []
        for digest in dict.fromkeys(touched):  # each once, in their order
            if self._holds(digest) == (digest in self._told):
                continue
            (removed if digest in self._told else added).append(digest)
        self._told.difference_update(removed)
        self._told.update(added)
        changes = len(added) + len(removed)
        if not changes and not self._whole:
            return None
        self._seq += 1
        room = max(len(self._told), SMALL)
        whole, self._whole = self._whole or changes > room, False
        changed = ((), ()) if whole else (tuple(added), tuple(removed))
        batch = Batch(self._seq, *changed, whole)
        self._logged += changes
        if not whole and self._logged <= room:
            return batch, None
        self._logged = 0 if whole else changes
        return batch, Snapshot(self._seq, frozenset(self._told))

    def lost(self) -> None:
        """Nobody may have what was told so far: next comes all that is held, if anything was."""
        self._whole = self._seq > 0


class Replica:
    """What one worker holds, as far as it is known; in the end exactly that, whatever was lost."""

    def __init__(self) -> None:
        self.position = 0
        """Batches behind this one are still to be read."""
        self.needs_snapshot = True
        self._seq = 0
        self._held: set[BlockHash] = set()
        self._tried = 0
        """A batch up to here that does not follow is no reason to load the snapshot once more."""

    @property
    def seq(self) -> int:
        """The last batch that what is known includes."""
        return self._seq

    @property
    def held(self) -> frozenset[BlockHash]:
        return frozenset(self._held)

    def apply(self, batch: Batch) -> None:
        """Take a batch that was read; one that does not follow may raise `needs_snapshot`."""
        self.position = max(self.position, batch.seq)
        if batch.seq <= self._seq:
            return
        if batch.whole or batch.seq != self._seq + 1:
            self.needs_snapshot = self.needs_snapshot or batch.seq > self._tried
            return
        self._seq = batch.seq
        self._held.update(batch.added)
        self._held.difference_update(batch.removed)

    def load(self, snapshot: Snapshot | None) -> None:
        """Take the snapshot as it was found, or that there is none.

        Then `apply` the batches behind it, or read on at `position`.
        """
        self.needs_snapshot = False
        self._tried = max(self._tried, self.position)
        if snapshot is not None and snapshot.seq > self._seq:
            self._seq = snapshot.seq
            self._held = set(snapshot.held)
        self.position = self._seq

    def count(self, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes` are held, from the first one on without a gap."""
        for number, digest in enumerate(hashes):
            if digest not in self._held:
                return number
        return len(hashes)
