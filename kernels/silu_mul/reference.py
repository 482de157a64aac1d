"""The gated activation of the MLP: silu(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F] (gate first) -> silu(gate) * up [T, F], in float32 and rounded once.

    Written out, because torch's own silu and sigmoid compute those elements that do not fill a
    vector with other code than the rest, so that a value's last bit depends on where it lies; its
    `exp` does not.
    """
    gate, up = gate_up.to(torch.float32, copy=True).chunk(2, dim=-1)
    divisor = gate.neg().exp_().add_(1.0)
    return gate.div_(divisor).mul_(up).to(gate_up.dtype)
