"""Root-mean-square norm over the last dimension, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E], weight [E] -> [..., E] in the dtype of x.

    The normed value is rounded to the dtype of x before the weight is applied (as `transformers`
    does). Rows are reduced one by one along contiguous memory, which torch does in one fixed order.
    """
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)
