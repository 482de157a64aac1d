"""The table of rotations: cosine and sine for every position, with scaled frequencies.

Every entry is the nearest float32 to what float32 operations before it gave: it is computed in
float64 and rounded, so that it depends neither on the processor nor on a library's version.
"""

from __future__ import annotations

import math

import numpy as np

from kvrelay.shared.checkpoint.config import ModelConfig, RopeScaling
from kvrelay.shared.model.pieces import Floats

_PIECE_POSITIONS = 1024
"""So many at once: float64 values of a long table would take more than the table itself."""


def rope_table(config: ModelConfig, positions: int, factors: Floats | None = None) -> Floats:
    """[P, 2, D/2]: cosine and sine, for exactly `positions` positions.

    `factors` [D/2] divide the frequencies (the tensor rope_freqs of a GGUF).
    """
    frequencies = _frequencies(config)
    if factors is not None:
        frequencies = frequencies / factors
    table = np.empty((positions, 2, config.head_dim // 2), np.float32)
    for first in range(0, positions, _PIECE_POSITIONS):
        piece = table[first : first + _PIECE_POSITIONS]
        at = np.arange(first, first + len(piece), dtype=np.float32)
        angles = (at[:, None] * frequencies).astype(np.float64)
        piece[:, 0], piece[:, 1] = np.cos(angles), np.sin(angles)
    return table


def _frequencies(config: ModelConfig) -> Floats:
    """[D/2], in radians per position."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = np.float32(1.0) / powers
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Floats, scaling: RopeScaling) -> Floats:
    """Waves longer than the original context are slowed by `factor`, short ones are kept."""
    waves = np.float32(2 * math.pi) / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_positions / waves - low) / (high - low)).clip(0.0, 1.0)
    mixed = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return mixed.astype(np.float32)
