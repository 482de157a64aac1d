"""Rotary position embedding of queries and keys, and the write of keys and values into the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of a step live. All tensors are int64 of length T."""

    positions: Tensor
    """Position in the request, which is the row of the rope table."""
    blocks: Tensor
    """Block of the pool."""
    slots: Tensor
    """Slot in that block."""


def rope_write(q: Tensor, k: Tensor, v: Tensor, table: Tensor, kv: Tensor, at: Slots) -> Tensor:
    """Rotate q and k, write k and v into their slots, and give back the rotated q in float32.

    q [T, Hq, D], k and v [T, Hk, D]; table [P, 2, D/2] float32 (cosine, sine) by position;
    kv [NB, 2, Hk, BS, D]: one layer of the pool, written in place, rounded once to its dtype.
    Dimension d is paired with d + D/2 (the half-split form of Hugging Face checkpoints).
    """
    heads_q, dim = q.shape[1], q.shape[2]
    assert k.shape == v.shape and k.shape[1:] == (kv.shape[2], dim), (k.shape, v.shape, kv.shape)
    assert table.shape[1:] == (2, dim // 2), table.shape
    cosine, sine = table[at.positions].unsqueeze(1).unbind(2)  # [T, 1, D/2] each
    low, high = torch.cat((q, k), dim=1).to(torch.float32).chunk(2, dim=-1)  # [T, Hq+Hk, D/2]
    # Products and sums stay separate operations: a fused one may round differently at the end of a
    # vector than in its middle.
    turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
    keys_values = torch.stack((turned[:, heads_q:].to(kv.dtype), v.to(kv.dtype)), dim=1)
    kv[at.blocks, :, :, at.slots] = keys_values  # [T, 2, Hk, D]
    return turned[:, :heads_q]
