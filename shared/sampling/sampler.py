"""Draws one token from one row of logits: a pure function of the row, the parameters and the draw.

The noise is one uniform number per token, Philox keyed by (seed, choice, index). It is turned into
a token by inverting the cumulative distribution of the kept ids in vocabulary order, in float64. So
neither the batch nor the history of a request has any part in it, and any worker can continue it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.errors import WorkerFailed
from kvrelay.shared.sampling.edits import Edits, apply
from kvrelay.shared.types import SamplingParams

Logits: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.intp]

_FIRST_GUESS = 64
"""How many of the likeliest ids top_p sorts at first; eight times as many whenever it goes on."""


class BadLogits(WorkerFailed):
    """The model computed something that is not a number, or nothing is left to draw from."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Which token of a request is drawn, and from which ids."""

    choice: int
    index: int
    """Output index of the token."""
    banned: tuple[int, ...] = ()
    vocab_limit: int | None = None
    """Ids from here on do not exist; None: all of the row do."""
    edits: Edits | None = None
    """What is done to the logits first."""


def sample(logits: Logits, params: SamplingParams, draw: Draw) -> int:
    """The token id. `logits` is one row [V] and is not changed.

    Edits come first, then bans, temperature, top_k, top_p (of the mass that top_k left) and min_p
    (relative to the likeliest id). Ids of equal logits rank by id, the lowest first.
    Raises `BadLogits` for NaN, +inf, or when every id is banned or -inf.
    """
    row = _allowed(logits, draw)
    if params.temperature == 0.0:
        return int(row.argmax())
    ids, weights = _kept(row, params)
    cumulative = np.cumsum(weights)
    target = uniform(params.seed, draw.choice, draw.index) * cumulative[-1]
    # Rounding may bring the target up to the very end, where ids of no weight may lie.
    target = min(target, np.nextafter(cumulative[-1], 0.0))
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def uniform(seed: int, choice: int, index: int) -> float:
    """The noise of one token: a multiple of 2^-53 in [0, 1).

    Philox4x64-10 with key (seed, choice) and counter (index, 0, 0, 0), first word, top 53 bits.
    """
    # The generator steps its counter before the first word: it starts one below.
    philox = np.random.Philox(counter=(index - 1) % 2**256, key=seed + (choice << 64))
    return float(philox.random_raw() >> 11) * 2.0**-53


def _allowed(logits: Logits, draw: Draw) -> Logits:
    """The row up to the vocabulary's end, edited, with banned ids at -inf; checked."""
    row = logits[: draw.vocab_limit]
    banned = [token for token in draw.banned if 0 <= token < len(row)]
    if banned or draw.edits is not None:
        row = row.copy()
    if draw.edits is not None:
        apply(row, draw.edits)
    if banned:
        row[banned] = -np.inf
    check(row)
    return row


def check(row: Logits) -> None:
    """Raises `BadLogits` unless its largest logit is a finite number, and none is no number."""
    top = row.max(initial=-np.inf)  # NaN if there is one
    if not np.isfinite(top):
        raise BadLogits(f"the largest of {len(row)} logits is {top}, which gives no token")


def _kept(row: Logits, params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """Ids that may be drawn, in ascending order, and their weights (not normalised)."""
    with np.errstate(over="ignore"):  # at the smallest temperatures all but the best are -inf
        scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
    ids = np.arange(len(row))
    if 0 < params.top_k < len(row):
        ids = _likeliest(scaled, params.top_k)
        scaled = scaled[ids]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        keep = _nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    if params.min_p > 0.0:  # the likeliest id has the weight exp(0) = 1
        keep = np.flatnonzero(weights >= params.min_p)
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _likeliest(values: NDArray[np.float64], count: int) -> Ids:
    """Indices of the `count` largest values in ascending order; of equal ones the first."""
    if count >= len(values):
        return np.arange(len(values))
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    at_edge = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, at_edge)))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> Ids:
    """Ascending indices of the fewest, likeliest weights whose sum reaches top_p of the whole."""
    wanted = top_p * weights.sum()
    count = _FIRST_GUESS
    while True:
        candidates = _likeliest(weights, count)
        by_weight = candidates[np.argsort(-weights[candidates], kind="stable")]
        reached = int(np.searchsorted(np.cumsum(weights[by_weight]), wanted)) + 1
        if reached <= len(candidates) or len(candidates) == len(weights):
            return np.sort(by_weight[:reached])
        count *= 8
