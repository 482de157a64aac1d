"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """token_ids [T] int64, table [V, E] -> [T, E]. An id outside the table is an IndexError."""
    assert token_ids.dim() == 1 and table.dim() == 2, (token_ids.shape, table.shape)
    return table.index_select(0, token_ids)
