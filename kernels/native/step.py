"""What a step is handed over as and what comes back: `kvr_step_args` and `kvr_draw` from Python."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Numbers = Sequence[int] | Ints


class NativeError(Exception):
    """The library could not be used, or refused what it was given."""


@dataclass(frozen=True, slots=True)
class Pool:
    """KV memory `[blocks][layers][K|V][kv_heads][block_size][head_dim]` in the model's dtype."""

    address: int
    blocks: int


@dataclass(slots=True)
class Batch:
    """The tokens of a step, row by row. Row i computes `counts[i]` tokens from `starts[i]` on."""

    tokens: Numbers
    starts: Numbers
    counts: Numbers
    tables: Numbers
    """The rows' block tables end to end: as many entries of each as its last position needs."""
    wanted: Numbers
    """Indices into `tokens` of those whose logits are computed."""


class Draw(NamedTuple):
    """How one wanted row's token is drawn: `kvr_draw`, and as a tuple, which is packed as it is."""

    temperature: float
    """0: the likeliest id, and nothing else counts."""
    top_p: float
    min_p: float
    seed: int
    choice: int
    output_index: int
    top_k: int
    limit: int
    """Ids from here on are not drawn; at most the vocabulary."""
    banned: Sequence[int] = ()
    """Ids that are not drawn either; any that do not exist are ignored."""


class DrawStatus(IntEnum):
    """Whether a row gave a token, and why not."""

    DRAWN = 0
    NAN = 1
    INFINITE = 2
    """The largest logit is infinite."""
    NOTHING = 3
    """Every id is banned or has the logit -inf."""


class Memory:
    """What the library writes in and nobody else: pages that are not used cost nothing."""

    def __init__(self, size: int) -> None:
        self.of = np.empty(size, np.uint8)
        self.address = int(self.of.ctypes.data)
        self.bytes = size


class StepArgs(ctypes.Structure):
    """`kvr_step_args`. It may be filled again and again, and keeps the arrays that it points to.

    After a step, whatever runs first runs from memory: few calls, and none of numpy's.
    """

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("pool_blocks", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("table_offsets", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("wanted", ctypes.c_int32),
        ("wanted_at", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("banned", ctypes.c_void_p),
        ("all_banned", ctypes.c_int64),
        ("drawn", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("draw_memory", ctypes.c_void_p),
        ("draw_memory_bytes", ctypes.c_int64),
        ("alone", ctypes.c_int32),
    )

    def put(self, batch: Batch, pool: Pool, block_size: int) -> None:
        """All but the logits and draws. Raises `NativeError` when the tables are too short."""
        offsets, entries = array("q"), 0
        for start, count in zip(batch.starts, batch.counts, strict=True):
            offsets.append(entries)
            entries += -(-(start + count) // block_size)
        if len(batch.tables) < entries:
            raise NativeError(f"the block tables have {len(batch.tables)} entries of {entries}")
        together = [*batch.tokens, *batch.starts, *batch.counts, *batch.wanted, *batch.tables]
        numbers = array("i", together)
        tokens, rows, wanted = len(batch.tokens), len(offsets), len(batch.wanted)
        at, _ = numbers.buffer_info()
        self.pool, self.pool_blocks = pool.address, pool.blocks
        self.tokens, self.rows, self.wanted = tokens, rows, wanted
        self.token_ids = at
        self.starts = at + 4 * tokens
        self.counts = at + 4 * (tokens + rows)
        self.wanted_at = at + 4 * (tokens + 2 * rows)
        self.tables = at + 4 * (tokens + 2 * rows + wanted)
        self.table_offsets, _ = offsets.buffer_info()
        self.kept = numbers, offsets


_DRAW = struct.Struct("=3d3Q4i")
"""`kvr_draw`, which has no padding: eight words, of which one is the output index."""
_WORDS, _INDEX = 8, 5


class Drawing:
    """Draws as the library reads them, and where it writes what it drew.

    The same ones may be made in any number of steps, of which each needs its own output indices.
    """

    def __init__(self, draws: Sequence[Draw], *, logprobs: bool = False) -> None:
        banned: list[int] = []
        packed: list[bytes] = []
        for draw in draws:
            packed.append(_DRAW.pack(*draw[:-1], len(banned), len(draw.banned)))
            banned += draw.banned
        self._draws = array("Q", b"".join(packed))
        self._banned = array("i", banned)
        self.drawn = array("i", bytes(8 * len(draws)))
        """By the last call, of each row: the token (0 where none was drawn), its `DrawStatus`."""
        self.logprobs = np.empty(len(draws), np.float32) if logprobs else None
        """Of the tokens in the softmax of the bare logits below the limit: before temperature,
        filters and bans. NaN where a logit is NaN or no token was drawn; None unless asked for."""

    @property
    def tokens(self) -> list[int]:
        return self.drawn[0::2].tolist()

    @property
    def statuses(self) -> list[int]:
        return self.drawn[1::2].tolist()

    def at(self, output_indices: Sequence[int]) -> None:
        """The next draws are of the tokens with these indices."""
        self._draws[_INDEX::_WORDS] = array("Q", output_indices)

    def put(self, args: StepArgs, memory: Memory) -> None:
        """Ask for the draws in a call's arguments; all live until it has returned."""
        assert len(self.drawn) == 2 * args.wanted, (len(self.drawn), args.wanted)
        args.draws, _ = self._draws.buffer_info()
        args.banned, args.all_banned = self._banned.buffer_info()
        args.drawn, _ = self.drawn.buffer_info()
        args.logprobs = None if self.logprobs is None else self.logprobs.ctypes.data
        args.draw_memory, args.draw_memory_bytes = memory.address, memory.bytes
