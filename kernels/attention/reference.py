"""Causal attention of a step's queries over the paged pool: prefill, chunks and decode in one form.

Softmax over a request's keys is a fixed sum over key tiles: each tile gives its largest score, the
sum of its weights and their weighted values; the tiles are then brought to the largest score of all
and added in order of position. All of it is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.attention.schedule import KEY_TILE, QUERY_TILE, Group, Schedule

_LOWEST = torch.finfo(torch.float32).min
"""The largest score of a tile with no visible key: finite, so that no NaN comes of it."""


def attention(q: Tensor, pool: Tensor, layer: int, plan: Schedule, scale: float) -> Tensor:
    """q [T, Hq, D] float32, pool [NB, L, 2, Hk, BS, D] contiguous -> [T, Hq, D] float32.

    Reads only slots of positions before the end of each request; others may hold NaN. Query head h
    uses key head h // (Hq / Hk).
    """
    heads_k, dim = pool.shape[3], pool.shape[5]
    per_key_head = q.shape[1] // heads_k
    assert q.shape == (plan.tokens, heads_k * per_key_head, dim), (q.shape, pool.shape)
    assert q.dtype == torch.float32, q.dtype

    grid = (q * scale).index_select(0, plan.fill)
    tiled = grid.view(plan.tiles, QUERY_TILE, heads_k, per_key_head, dim).permute(2, 0, 1, 3, 4)
    queries = tiled.reshape(heads_k, plan.tiles, QUERY_TILE * per_key_head, dim)  # [Hk, Q, rows, D]

    parts = [
        _attend(queries[:, group.first : group.first + group.count], pool, layer, group)
        for group in plan.groups
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # [Hk, Q, rows, D]
    out = out.view(heads_k, plan.tiles, QUERY_TILE, per_key_head, dim).permute(1, 2, 0, 3, 4)
    return out.reshape(plan.tiles * QUERY_TILE, q.shape[1], dim).index_select(0, plan.places)


def _attend(queries: Tensor, pool: Tensor, layer: int, group: Group) -> Tensor:
    """queries [Hk, G, rows, D] -> [Hk, G, rows, D] for the tiles of one group."""
    keys, values = _gather(pool, layer, group)  # [Hk, U, KEY_TILE, D]
    users = [hi - lo for lo, hi in group.rounds]
    if not group.shared:
        queries_of_pairs = queries.index_select(1, group.pair_tiles)
        partial = _partial(queries_of_pairs, keys, values, group.hidden)
        return _merge(
            group, list(zip(*(torch.split(each, users, dim=1) for each in partial), strict=True))
        )
    parts = []
    for number, hidden in enumerate(torch.split(group.hidden, users)):
        lo, hi = group.rounds[number]
        key_tile, value_tile = (
            tile[:, number : number + 1].expand(-1, hi - lo, -1, -1) for tile in (keys, values)
        )
        parts.append(_partial(queries[:, lo:hi], key_tile, value_tile, hidden))
    return _merge(group, parts)


def _gather(pool: Tensor, layer: int, group: Group) -> tuple[Tensor, Tensor]:
    """The group's key tiles out of the pool: keys and values [Hk, U, KEY_TILE, D] in float32."""
    _, layers, _, heads, block_size, dim = pool.shape
    tiles, per_tile = group.blocks.shape
    pieces = pool.view(len(pool), layers, -1)[:, layer]  # [NB, 2 * Hk * BS * D]
    blocks = pieces.index_select(0, group.blocks.flatten())
    blocks = blocks.view(tiles, per_tile, 2, heads, block_size, dim).permute(2, 3, 0, 1, 4, 5)
    wide = blocks.to(torch.float32, memory_format=torch.contiguous_format)
    both = wide.reshape(2, heads, tiles, KEY_TILE, dim)
    for tile, used in group.ends:
        both[:, :, tile, used:] = 0.0  # a weight of zero times NaN would be NaN
    return both[0], both[1]


def _partial(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One key tile for each of n query tiles: queries [Hk, n, rows, D], keys [Hk, n, KEY_TILE, D].

    Gives the largest score [Hk, n, rows, 1], the sum of the weights [Hk, n, rows, 1] and the
    weighted values [Hk, n, rows, D].
    """
    heads, count, rows, _ = queries.shape
    scores = _products(queries, keys.transpose(2, 3))  # [Hk, n, rows, KEY_TILE]
    by_position = scores.view(heads, count, QUERY_TILE, rows // QUERY_TILE, KEY_TILE)
    by_position.masked_fill_(hidden.unsqueeze(2), -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    weights = scores.sub_(top).exp_()
    return top, weights.sum(-1, keepdim=True), _products(weights, values)


def _merge(group: Group, parts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Add the rounds' partial results (as `_partial` gives them) in order, at one common scale."""
    heads, _, rows, dim = parts[0][2].shape
    if len(parts) == 1:  # what follows would multiply by exactly 1 and add to 0
        return (parts[0][2] + 0.0) / parts[0][1]
    top = parts[0][0].new_full((heads, group.count, rows, 1), _LOWEST)
    total = torch.zeros_like(top)
    mix = top.new_zeros((heads, group.count, rows, dim))
    for (lo, hi), (part_top, _, _) in zip(group.rounds, parts, strict=True):
        top[:, lo:hi] = torch.maximum(top[:, lo:hi], part_top)
    for (lo, hi), (part_top, part_total, part_mix) in zip(group.rounds, parts, strict=True):
        weight = torch.exp(part_top - top[:, lo:hi])
        total[:, lo:hi] += weight * part_total
        mix[:, lo:hi] += weight * part_mix
    return mix / total


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a [Hk, n, r, c] @ b [Hk, n, c, s] as Hk * n products of one shape; b may repeat over n."""
    if b.stride(1) == 0:  # flattening would copy a shared tile n times
        return torch.stack([_bmm(x, y) for x, y in zip(a, b, strict=True)])
    return _bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:3], b.shape[3])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Never a batch of one: MKL splits a lone product over threads, and then sums otherwise."""
    if len(a) > 1:
        return torch.bmm(a, b)
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
