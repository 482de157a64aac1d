"""y = x W^T + b in fixed tiles of rows, so that a row's bits do not depend on its neighbours.

Matmul libraries choose their code path by shape: the same row can differ in its last bit between a
batch of 1 and a batch of 9. Every product here therefore has exactly `ROW_TILE` rows. oneDNN with
weights packed once then gives the same bits for every place in the tile and every thread count
(MKL, which torch uses for plain fp32 linear layers, does not, and packing is also faster).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 16
"""Rows per product: with 8 a prompt takes twice as long, with 32 a lone decoded row is slower."""

_DEPTH = 32
"""AMX reads the inner dimension in steps of 32 and multiplies what lies past the end of a row by
zero. That is the next row, and 0 * NaN is NaN (seen from 32 rows up): so rows are padded to whole
steps. Those of real models already are."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weights of one linear layer in the form `linear` wants; made once by `pack`."""

    weight: Tensor
    """oneDNN's blocked form of `[out, depth]`, or that matrix itself where oneDNN cannot run."""
    bias: Tensor | None
    out_features: int
    in_features: int
    depth: int
    """`in_features` rounded up to whole steps."""
    blocked: bool


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack weight [out, in] (bfloat16 or float32) and bias [out] of the same dtype."""
    assert weight.dim() == 2, weight.shape
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)
    out_features, in_features = weight.shape
    depth = -(-in_features // _DEPTH) * _DEPTH
    padded = functional.pad(weight, (0, depth - in_features)).contiguous()
    blocked = onednn_runs(weight.dtype)
    if blocked:
        padded = torch.ops.mkldnn._reorder_linear_weight(padded, ROW_TILE)
    return PackedLinear(padded, bias, out_features, in_features, depth, blocked)


def onednn_runs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this dtype on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, in] -> [T, out], both in the dtype of the weights. T may be any number of rows.

    Row t of the result is a function of row t of x alone, bit for bit.
    """
    rows = x.shape[0]
    assert x.dim() == 2 and x.shape[1] == packed.in_features, x.shape
    spare_rows = -rows % ROW_TILE
    if spare_rows or packed.depth != packed.in_features:
        x = functional.pad(x, (0, packed.depth - packed.in_features, 0, spare_rows))
    if x.shape[0] == ROW_TILE:
        return _product(x.contiguous(), packed)[:rows]
    out = x.new_empty((x.shape[0], packed.out_features))
    for first in range(0, x.shape[0], ROW_TILE):
        out[first : first + ROW_TILE] = _product(x[first : first + ROW_TILE], packed)
    return out[:rows]


def _product(tile: Tensor, packed: PackedLinear) -> Tensor:
    """One tile [ROW_TILE, depth] -> [ROW_TILE, out]."""
    if not packed.blocked:
        return functional.linear(tile, packed.weight, packed.bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        tile, packed.weight, packed.bias, "none", [], ""
    )
    return product
