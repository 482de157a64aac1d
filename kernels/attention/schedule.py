"""The shape of a step's attention: which query tiles meet which key tiles, worked out once a step.

    queries of a request, tiles of QUERY_TILE positions:   |0 1 2 3|4 5 6 7|8 ...
    its keys, tiles of KEY_TILE positions:                 |0 ... 127|128 ... 255|256 ...

Both grids start at position 0 of the request, never at the start of a chunk. So a token meets its
keys in products of one shape, at one place in them and in one order, whatever else is in the step:
that is what makes its result independent of batch, chunking and block table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUERY_TILE = 4
"""Positions per query tile. A lone decoded token pays for the whole tile: 8 costs it twice as much,
while a prompt gains little."""
KEY_TILE = 128
"""Positions per key tile: the fixed split of the sum over keys. Block sizes divide it."""

_MAX_PAIRS = 24
"""Pairs whose keys are held in float32 at once; bounds memory, changes no result."""
_MAX_QUERY_TILES = 64


@dataclass(frozen=True, slots=True)
class PagedRow:
    """Queries at positions start .. start+count-1; position p is in block `blocks[p // size]`."""

    start: int
    count: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Query tiles that are computed together, tiles `first` .. `first + count - 1` of the step.

    Either many tiles of one request, which share its key tiles, or single tiles of many requests,
    each with key tiles of its own. Round j adds one key tile to the query tiles lo .. hi-1.
    """

    first: int
    count: int
    shared: bool
    rounds: tuple[tuple[int, int], ...]
    """(lo, hi) relative to `first`. A query tile gets its key tiles in ascending order."""
    blocks: Tensor
    """[U, KEY_TILE / block size] int64: the blocks of each key tile; U is the number of rounds if
    shared, else the number of pairs, round by round."""
    ends: tuple[tuple[int, int], ...]
    """(key tile, used slots) of those that a request ends in: the rest of it may hold anything."""
    pair_tiles: Tensor
    """[P] int64: the query tile of each pair, relative to `first`, round by round."""
    hidden: Tensor
    """[P, QUERY_TILE, KEY_TILE] bool: keys that the query must not see."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything about a step that all layers share. T tokens, Q query tiles."""

    tokens: int
    tiles: int
    places: Tensor
    """[T] int64: the place of each token in the grid of Q * QUERY_TILE positions."""
    fill: Tensor
    """[Q * QUERY_TILE] int64: the token at each place; at places of no token, one of its tile."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    """One query tile: QUERY_TILE positions of one row from `start` on."""

    row: PagedRow
    start: int
    keys: range
    """The key tiles it needs."""


def schedule(rows: Sequence[PagedRow], block_size: int, window: int | None = None) -> Schedule:
    """Plan the step for rows in token order. `window`: how many last positions a query sees."""
    if KEY_TILE % block_size:
        raise ValueError(
            f"block size {block_size} does not divide the key tile of {KEY_TILE} tokens"
        )
    clusters = list(_clusters(rows, window))
    groups: list[Group] = []
    first_tile: dict[int, int] = {}
    tiles = 0
    for cluster in clusters:
        groups.append(_group(cluster, tiles, block_size, window))
        for at, tile in enumerate(cluster):
            first_tile.setdefault(id(tile.row), tiles + at)
        tiles += len(cluster)
    places = [
        np.arange(row.count) + first_tile[id(row)] * QUERY_TILE + row.start % QUERY_TILE
        for row in rows
    ]
    where = np.concatenate(places)
    return Schedule(
        tokens=len(where),
        tiles=tiles,
        places=torch.from_numpy(where),
        fill=torch.from_numpy(_fill(where, tiles)),
        groups=tuple(groups),
    )


def _fill(places: NDArray[np.intp], tiles: int) -> NDArray[np.intp]:
    tokens = np.arange(len(places))
    by_tile = np.empty(tiles, dtype=np.intp)
    by_tile[places // QUERY_TILE] = tokens
    fill = np.repeat(by_tile, QUERY_TILE)
    fill[places] = tokens
    return fill


def _clusters(rows: Sequence[PagedRow], window: int | None) -> Iterator[list[_Tile]]:
    """The query tiles of all rows, in the lists that become groups."""
    singles: list[_Tile] = []
    for row in rows:
        tiles = list(_tiles(row, window))
        if len(tiles) == 1:
            singles += tiles
            continue
        for first in range(0, len(tiles), _MAX_QUERY_TILES):
            yield tiles[first : first + _MAX_QUERY_TILES]
    singles.sort(key=lambda tile: len(tile.keys))
    cluster: list[_Tile] = []
    pairs = 0
    for tile in singles:
        if cluster and pairs + len(tile.keys) > _MAX_PAIRS:
            yield cluster
            cluster, pairs = [], 0
        cluster.append(tile)
        pairs += len(tile.keys)
    if cluster:
        yield cluster


def _tiles(row: PagedRow, window: int | None) -> Iterator[_Tile]:
    end = row.start + row.count
    for start in range(row.start - row.start % QUERY_TILE, end, QUERY_TILE):
        last_key = min(start + QUERY_TILE, end) - 1
        first_key = 0 if window is None else max(0, start - window + 1)
        yield _Tile(row, start, range(first_key // KEY_TILE, last_key // KEY_TILE + 1))


def _group(cluster: list[_Tile], first: int, block_size: int, window: int | None) -> Group:
    shared = len(cluster) > 1 and cluster[0].row is cluster[1].row
    rounds = _shared_rounds(cluster) if shared else _single_rounds(cluster)
    users = [(at, number) for number, (lo, hi) in enumerate(rounds) for at in range(lo, hi)]
    base = cluster[0].keys[0]
    pairs = [(at, (base if shared else cluster[at].keys[0]) + number) for at, number in users]
    if shared:
        key_tiles = [(cluster[-1].row, base + number) for number in range(len(rounds))]
    else:
        key_tiles = [(cluster[at].row, key) for at, key in pairs]
    return Group(
        first=first,
        count=len(cluster),
        shared=shared,
        rounds=rounds,
        blocks=torch.tensor([_tile_blocks(row, key, block_size) for row, key in key_tiles]),
        ends=_ends(key_tiles),
        pair_tiles=torch.tensor([at for at, _ in pairs]),
        hidden=_hidden([cluster[at].start for at, _ in pairs], [key for _, key in pairs], window),
    )


def _shared_rounds(cluster: list[_Tile]) -> tuple[tuple[int, int], ...]:
    """Round j is key tile `base + j`; tiles are in order of position, so its users are a range."""
    keys = range(cluster[0].keys[0], cluster[-1].keys[-1] + 1)
    users = [[at for at, tile in enumerate(cluster) if key in tile.keys] for key in keys]
    return tuple((tiles[0], tiles[-1] + 1) for tiles in users)


def _single_rounds(cluster: list[_Tile]) -> tuple[tuple[int, int], ...]:
    """Round j is the j-th key tile of each; they come in order of length, so the last go on."""
    lengths = [len(tile.keys) for tile in cluster]
    return tuple(
        (sum(length <= number for length in lengths), len(cluster)) for number in range(lengths[-1])
    )


def _tile_blocks(row: PagedRow, key: int, block_size: int) -> list[int]:
    """The blocks of one key tile. Past the request's end its first block stands in, unused."""
    per_tile = KEY_TILE // block_size
    used = -(-(row.start + row.count) // block_size)
    blocks = list(row.blocks[key * per_tile : min((key + 1) * per_tile, used)])
    return blocks + [row.blocks[0]] * (per_tile - len(blocks))


def _ends(key_tiles: list[tuple[PagedRow, int]]) -> tuple[tuple[int, int], ...]:
    used = [row.start + row.count - key * KEY_TILE for row, key in key_tiles]
    return tuple((at, slots) for at, slots in enumerate(used) if slots < KEY_TILE)


def _hidden(query_starts: list[int], keys: list[int], window: int | None) -> Tensor:
    queries = torch.tensor(query_starts).view(-1, 1, 1) + torch.arange(QUERY_TILE).view(1, -1, 1)
    positions = torch.tensor(keys).view(-1, 1, 1) * KEY_TILE + torch.arange(KEY_TILE)
    hidden = positions > queries
    return hidden if window is None else hidden | (positions <= queries - window)
