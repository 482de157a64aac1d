"""Which worker holds which prefix blocks: what decisions ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrelay.shared.kv.prefix import BlockHash


class Holdings(Protocol):
    """What decisions ask, by incarnation of a worker."""

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many blocks of this chain each worker holds, from its first one on without a gap.

        Workers that hold none are absent.
        """
        ...

    def forget(self, incarnation: str) -> None:
        """The worker is gone, or cannot be reached."""
        ...


class NothingKnown:
    """`Holdings` of a router that is told nothing."""

    def held_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        return {}

    def forget(self, incarnation: str) -> None: ...
