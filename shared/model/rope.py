"""The table of rotations: cosine and sine for every position, with scaled frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvrelay.shared.checkpoint.config import ModelConfig, RopeScaling
from kvrelay.shared.intmath import cdiv

_PIECE_POSITIONS = 1024
"""The table is computed in pieces of one shape, so that an entry does not depend on its length."""


def rope_table(config: ModelConfig, positions: int, factors: Tensor | None = None) -> Tensor:
    """[P, 2, D/2] float32: cosine and sine, for at least `positions` positions.

    `factors` [D/2] divide the frequencies (the tensor rope_freqs of a GGUF).
    """
    frequencies = _frequencies(config)
    if factors is not None:
        frequencies = frequencies / factors
    pieces = []
    for piece in range(cdiv(positions, _PIECE_POSITIONS)):
        first = piece * _PIECE_POSITIONS
        at = torch.arange(first, first + _PIECE_POSITIONS, dtype=torch.float32)
        angles = at.unsqueeze(1) * frequencies
        pieces.append(torch.stack((angles.cos(), angles.sin()), dim=1))
    return torch.cat(pieces)


def _frequencies(config: ModelConfig) -> Tensor:
    """[D/2] float32, in radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves longer than the original context are slowed by `factor`, short ones are kept."""
    waves = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_positions / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
