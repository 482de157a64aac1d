"""What a request asks to be done to its logits before a token is drawn from them.

Penalties, then biases, then masks. Each is computed in float64 and rounded to the row's float32.
What is not finite stays as it is: only what the model gave can spoil a row, or rule an id out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[np.uint32]
"""Bit id % 32 of word id // 32 says whether the id may be drawn."""

_MOST = float(np.finfo(np.float32).max)


@dataclass(slots=True, eq=False)
class Edits:
    """Of one row, as of now. Whoever made it may go on to change it between two steps."""

    repetition: float = 1.0
    """The logits of known ids: positive ones are divided by it, others multiplied with it."""
    presence: float = 0.0
    """Then those that the answer has lose so much ..."""
    frequency: float = 0.0
    """... and so much for each time that it has them."""
    known: array[int] = field(default_factory=lambda: array("i"))
    """Pairs: an id of prompt or answer, each once, and how often the answer has it."""
    biased: array[int] = field(default_factory=lambda: array("i"))
    """Ids, each once."""
    bias: array[float] = field(default_factory=lambda: array("d"))
    """What their logits gain."""
    masks: Sequence[Mask] = ()
    """Only ids that all of them have may be drawn: two at most, each over the vocabulary."""


def apply(row: NDArray[np.float32], edits: Edits) -> None:
    """Edit the row in place. Ids that it does not have are ignored."""
    known = np.asarray(edits.known).reshape(-1, 2)
    ids, times = known[_exist(known[:, 0], row)].T
    logits = row[ids].astype(np.float64)
    with np.errstate(all="ignore"):  # what overflows is brought back
        logits = np.where(logits > 0, logits / edits.repetition, logits * edits.repetition)
    lost = edits.presence + edits.frequency * times
    row[ids] = _rounded(np.where(times > 0, logits - lost, logits))
    biased = np.asarray(edits.biased)
    kept = _exist(biased, row)
    ids = biased[kept]
    row[ids] = _rounded(row[ids] + np.asarray(edits.bias)[kept])
    for mask in edits.masks:
        bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")
        row[bits == 0] = -np.inf


def mask_of(ids: Sequence[int], vocab: int) -> Mask:
    """The mask that allows these ids and no others; those outside the vocabulary are ignored."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[[token for token in ids if 0 <= token < vocab]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _exist(ids: NDArray[np.intc], row: NDArray[np.float32]) -> NDArray[np.intp]:
    """Which of the ids have a finite logit."""
    within = np.flatnonzero((ids >= 0) & (ids < len(row)))
    return within[np.isfinite(row[ids[within]])]


def _rounded(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(logits, -_MOST, _MOST)
