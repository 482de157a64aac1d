"""What a step is handed over as and what comes back: `kvr_step_args` and `kvr_draw` from Python."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Numbers = Sequence[int] | Ints
Mask = NDArray[np.uint32]
"""Bit id % 32 of word id // 32 says whether the id may be drawn."""
LOGIT_ROWS = 128
"""Rows of logits that are computed at a time and drawn from: of a prompt whose every position is
told of, thousands are wanted."""
NOT_GIVEN = NOT_TOLD = -1
MOST_TOPS = 20
"""`KVR_MOST_TOPS`."""


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


class Edits(Protocol):
    """What is done to a row's logits before a draw: `kvr_edits`."""

    @property
    def repetition(self) -> float: ...
    @property
    def presence(self) -> float: ...
    @property
    def frequency(self) -> float: ...
    @property
    def known(self) -> array[int]:
        """int32 pairs: an id, and how often the answer has it."""
        ...

    @property
    def biased(self) -> array[int]:
        """int32 ids."""
        ...

    @property
    def bias(self) -> array[float]:
        """float64, one for each of them."""
        ...

    @property
    def masks(self) -> Sequence[Mask]:
        """Two at most."""
        ...


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
    given: int = NOT_GIVEN
    """The row's token: nothing is drawn."""
    tops: int = NOT_TOLD
    """How many of the likeliest ids are told, beside what the token's own logprob is."""
    banned: Sequence[int] = ()
    """Ids that are not drawn either; any that do not exist are ignored."""
    edits: Edits | None = None


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
        ("logit_rows", ctypes.c_int32),
        ("banned", ctypes.c_void_p),
        ("all_banned", ctypes.c_int64),
        ("drawn", ctypes.c_void_p),
        ("told", ctypes.c_void_p),
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


class _Edits(ctypes.Structure):
    """`kvr_edits`."""

    _fields_ = (
        ("repetition", ctypes.c_double),
        ("presence", ctypes.c_double),
        ("frequency", ctypes.c_double),
        ("known_ids", ctypes.c_void_p),
        ("known", ctypes.c_int64),
        ("biased_ids", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("biased", ctypes.c_int64),
        ("masks", ctypes.c_void_p * 2),
    )

    def put(self, edits: Edits, limit: int) -> None:
        """Raises `NativeError` for masks that do not cover all ids below the limit."""
        self.repetition, self.presence = edits.repetition, edits.presence
        self.frequency = edits.frequency
        at, count = edits.known.buffer_info()
        self.known_ids, self.known = at, count // 2
        self.biased_ids, self.biased = edits.biased.buffer_info()
        self.bias, biases = edits.bias.buffer_info()
        if biases != self.biased or len(edits.masks) > len(self.masks):
            raise NativeError(f"{biases} biases of {self.biased} ids, {len(edits.masks)} masks")
        for number in range(len(self.masks)):
            self.masks[number] = None
        for number, mask in enumerate(edits.masks):
            if mask.dtype != np.uint32 or not mask.flags.c_contiguous or 32 * len(mask) < limit:
                raise NativeError(f"a mask has {len(mask)} words of {mask.dtype} for {limit} ids")
            self.masks[number] = mask.ctypes.data
        self.kept = edits.known, edits.biased, edits.bias, edits.masks


_DRAW = struct.Struct("=3d4Q6i")
"""`kvr_draw`, which has no padding: ten words, of which one is the output index."""
_WORDS, _INDEX = 10, 5
_TOLD = np.dtype(
    [
        ("logprob", np.float32),
        ("rank", np.int32),
        ("ids", np.int32, MOST_TOPS),
        ("logprobs", np.float32, MOST_TOPS),
    ]
)
"""`kvr_told`."""


class Drawing:
    """Draws as the library reads them, and where it writes what it drew.

    The same ones may be made in any number of steps, of which each needs its own output indices.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        banned: list[int] = []
        packed: list[bytes] = []
        self._edits: list[tuple[Edits, _Edits, int]] = []
        told = False
        for draw in draws:
            how, (top_k, limit, given, tops) = draw[:6], draw[6:10]
            edits = self._place_of(draw.edits, limit) if draw.edits is not None else 0
            bans = len(banned), len(draw.banned)
            packed.append(_DRAW.pack(*how, edits, top_k, limit, *bans, given, tops))
            banned += draw.banned
            told = told or tops >= 0
        self._draws = array("Q", b"".join(packed))
        self._banned = array("i", banned)
        self.drawn = array("i", bytes(8 * len(draws)))
        """By the last call, of each row: the token (0 where none was drawn), its `DrawStatus`."""
        self.told = np.empty(len(draws), _TOLD) if told else None
        """`kvr_told` of each row that asks for it and has a token; None where none asks."""

    def _place_of(self, edits: Edits, limit: int) -> int:
        own = _Edits()
        self._edits.append((edits, own, limit))
        return ctypes.addressof(own)

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
        """Ask for the draws in a call's arguments; all live until it has returned.

        Edits are those of now. Raises `NativeError` for a mask that is too short.
        """
        assert len(self.drawn) == 2 * args.wanted, (len(self.drawn), args.wanted)
        for edits, own, limit in self._edits:
            own.put(edits, limit)
        args.draws, _ = self._draws.buffer_info()
        args.banned, args.all_banned = self._banned.buffer_info()
        args.drawn, _ = self.drawn.buffer_info()
        args.told = None if self.told is None else self.told.ctypes.data
        args.draw_memory, args.draw_memory_bytes = memory.address, memory.bytes
