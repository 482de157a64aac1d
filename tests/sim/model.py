"""A model whose arithmetic is a hash chain: wrong, missing or stale KV gives other tokens, at once.

Slot p of a leg holds H(slot p-1, token p). A token is sampled from all slots of the leg, read from
the worker's own memory through the block table, as attention would.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.engine.draws import draw_tokens, wanted_of
from kvrelay.shared.engine.plan import Plan, PlannedRow, StepResult
from kvrelay.shared.engine.rows import row_for
from kvrelay.shared.engine.state import Leg
from kvrelay.shared.engine.steering import steering_of
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import LegRef, LegSpec, Logprobs, SamplingParams

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


def logits_of(slots: Sequence[int], steps: int = 1) -> list[NDArray[np.float32]]:
    """A row of them for each of the last `steps` slots."""
    rows = []
    for end in range(len(slots) - steps + 1, len(slots) + 1):
        key = sample(slots[:end], 0, 0, 0)
        rows.append(np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCAB, "f4"))
    return rows


def is_plain(how: SamplingParams) -> bool:
    """Whether the quick sampler does: it knows no more than the seed."""
    return how == SamplingParams(max_tokens=how.max_tokens, seed=how.seed)


@dataclass
class Undisturbed:
    """What an undisturbed run gives where the reference sampler draws each token from logits.

    Each step begins anew with all tokens so far, as if every one were a continuation.
    """

    tokens: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[Logprobs]

    @staticmethod
    def of(spec: LegSpec, weights: int = 0) -> Undisturbed:
        known, slots = [*spec.prompt], list[int]()
        answer = Undisturbed([], [], [])
        while len(answer.tokens) < spec.sampling.max_tokens:
            leg = Leg("", LegRef("", 0, 0), spec, Phase.RUNNING, known=known)
            leg.steering = steering_of(spec, VOCAB)
            leg.computed = len(slots)
            row = row_for(leg, leg.pending)
            for token in row.tokens:
                slots.append(chain(slots[-1] if slots else weights, token))
            result = StepResult(0)
            wanted = len(wanted_of(row))
            draw_tokens([(row, logits_of(slots, wanted))], VOCAB, result)
            answer.tokens.append(result.sampled[row.key])
            answer.logprobs.append(result.logprobs.get(row.key))
            answer.prompt_logprobs += result.prompt_logprobs.get(row.key, [])
            known.append(answer.tokens[-1])
        return answer


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
        result = StepResult(plan.step)
        for row in plan.rows:
            self._row(row, result)
        return result

    def _row(self, row: PlannedRow, result: StepResult) -> None:
        previous = self._slot(row, row.start - 1) if row.start else self._weights
        for offset, token in enumerate(row.tokens):
            previous = chain(previous, token)
            SLOT.pack_into(self._bytes, self._at(row, row.start + offset), previous)
        if not (wanted := wanted_of(row)):
            return
        length = row.start + wanted.stop
        slots = [self._slot(row, position) for position in range(length)]
        if is_plain(row.sampling):
            how = row.sampling
            result.sampled[row.key] = sample(slots, how.seed, row.choice, row.index)
        else:
            draw_tokens([(row, logits_of(slots, len(wanted)))], VOCAB, result)

    def _at(self, row: PlannedRow, position: int) -> int:
        return row.blocks[position // BLOCK] * BLOCK_BYTES + position % BLOCK * SLOT.size

    def _slot(self, row: PlannedRow, position: int) -> int:
        return int(SLOT.unpack_from(self._bytes, self._at(row, position))[0])
