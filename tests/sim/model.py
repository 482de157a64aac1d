"""A model whose arithmetic is a hash chain: wrong, missing or stale KV gives other tokens, at once.

Slot p of a leg holds H(slot p-1, token p). A token is sampled from all slots of the leg, read from
the worker's own memory through the block table, as attention would.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult

VOCAB = 997
SLOT = struct.Struct("<Q")
BLOCK = 4
BLOCK_BYTES = BLOCK * SLOT.size


def chain(previous: int, token: int) -> int:
    return SLOT.unpack(blake2b(struct.pack("<QQ", previous, token), digest_size=8).digest())[0]


def sample(slots: Sequence[int], seed: int, choice: int, index: int) -> int:
    mixed = 0
    for position, slot in enumerate(slots):
        mixed = (mixed * 31 + slot + position) % 2**64
    digest = blake2b(struct.pack("<QQQQ", mixed, seed, choice, index), digest_size=8).digest()
    return SLOT.unpack(digest)[0] % VOCAB


def reference(
    prompt: Sequence[int], count: int, seed: int = 0, choice: int = 0, weights: int = 0
) -> list[int]:
    """What an undisturbed run gives."""
    slots: list[int] = []
    for token in prompt:
        slots.append(chain(slots[-1] if slots else weights, token))
    out: list[int] = []
    for index in range(count):
        out.append(sample(slots, seed, choice, index))
        slots.append(chain(slots[-1], out[-1]))
    return out


class ChainMemory:
    """The KV memory and the runner of one simulated worker."""

    def __init__(self, blocks: int, weights: int = 0) -> None:
        """Other `weights` give other tokens."""
        self._weights = weights
        self._bytes = bytearray(b"\xee" * (blocks * BLOCK_BYTES))

    def view(self, first: int, count: int) -> memoryview:
        return memoryview(self._bytes)[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        for source, destination in plan.copies:
            self.view(destination, 1)[:] = self.view(source, 1)
        return StepResult(
            plan.step, {row.key: token for row in plan.rows if (token := self._row(row)) >= 0}
        )

    def _row(self, row: PlannedRow) -> int:
        previous = self._slot(row, row.start - 1) if row.start else self._weights
        for offset, token in enumerate(row.tokens):
            previous = chain(previous, token)
            SLOT.pack_into(self._bytes, self._at(row, row.start + offset), previous)
        if not row.sample:
            return -1
        length = row.start + len(row.tokens)
        slots = [self._slot(row, position) for position in range(length)]
        return sample(slots, row.sampling.seed, row.choice, row.index)

    def _at(self, row: PlannedRow, position: int) -> int:
        return row.blocks[position // BLOCK] * BLOCK_BYTES + position % BLOCK * SLOT.size

    def _slot(self, row: PlannedRow, position: int) -> int:
        return int(SLOT.unpack_from(self._bytes, self._at(row, position))[0])
