"""The shared library from Python: one model, computed a whole step per call, without the GIL.

What is handed over is checked here or in the library, so that no Python value can make it read or
write outside its arrays. `kvrelay_kernels.h` has the contracts in full.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np

from kvrelay.kernels.native.step import (
    LOGIT_ROWS,
    Batch,
    Draw,
    Drawing,
    Floats,
    Memory,
    NativeError,
    Pool,
    StepArgs,
)

__all__ = ["Batch", "Draw", "Drawing", "Floats", "Library", "NativeError", "NativeModel"]
__all__ += ["Pool", "Shape", "Slot", "Variant"]

LIBRARY = Path(__file__).parent / "libkvrelay_kernels.so"
ABI = 4
"""`KVR_ABI` of the header."""
VERSION = 4
"""Raised whenever a result changes in any bit."""


class Variant(IntEnum):
    """Kinds of processor, the slowest first. Results differ between them in their last bits."""

    PORTABLE = 0
    AVX2 = 1
    AVX512BF16 = 2
    AMX = 3


class Slot(IntEnum):
    """The tensors of a model; from ATTENTION_NORM to DOWN there is one per layer."""

    EMBED = 0
    HEAD = 1
    NORM = 2
    ATTENTION_NORM = 3
    Q = 4
    K = 5
    V = 6
    Q_BIAS = 7
    K_BIAS = 8
    V_BIAS = 9
    Q_NORM = 10
    K_NORM = 11
    ATTENTION_OUT = 12
    MLP_NORM = 13
    GATE = 14
    UP = 15
    DOWN = 16
    ROPE = 17


class Shape(ctypes.Structure):
    """`kvr_config`. `window` 0: every position is seen. `dtype`: 0 float32, 1 bfloat16."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("tied", ctypes.c_int32),
        ("qkv_bias", ctypes.c_int32),
        ("qk_norm", ctypes.c_int32),
        ("rms_eps", ctypes.c_float),
    )


_INT, _LONG, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvr_abi": (_INT, ()),
    "kvr_has_variant": (_INT, (_INT,)),
    "kvr_create": (_PTR, (_PTR, _INT, _INT)),
    "kvr_destroy": (None, (_PTR,)),
    "kvr_set": (_INT, (_PTR, _INT, _INT, _PTR, _LONG, _LONG)),
    "kvr_step": (_INT, (_PTR, _PTR)),
    "kvr_draw_memory": (_LONG, (_PTR,)),
    "kvr_draw_rows": (_INT, (_PTR, _PTR)),
    "kvr_progress": (ctypes.POINTER(_LONG), (_PTR,)),
    "kvr_linear": (_INT, (_PTR, _INT, _INT, _PTR, _INT, _PTR)),
    "kvr_attention": (_INT, (_PTR, _PTR, _INT, _PTR, _PTR)),
    "kvr_times": (None, (_PTR, _PTR)),
}
_COMPLAINTS = {
    1: "a tensor that the model does not have, or not in this shape",
    2: "a token id outside the vocabulary",
    3: "a position outside the rope table, or a token that is not in the step",
    4: "a block outside the pool",
    5: "no memory for a step of so many tokens",
    6: "a draw from ids outside the vocabulary, or more logprobs than are told",
}


class Library:
    """The loaded library, and which of its variants this processor can run."""

    def __init__(self, file: Path = LIBRARY) -> None:
        """Raises `NativeError` when the file is not there, cannot be loaded or is another ABI's."""
        if not file.exists():
            raise NativeError(f"{file.name} was not built: no C++ compiler at install")
        try:
            self.calls = ctypes.CDLL(str(file))
            for name, (result, arguments) in _PROTOTYPES.items():
                call = getattr(self.calls, name)
                call.restype, call.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NativeError(f"{file.name} cannot be loaded: {error}") from error
        if (abi := self.calls.kvr_abi()) != ABI:
            raise NativeError(f"{file.name} has the ABI {abi}, not {ABI}: build it anew")
        self.variants = tuple(v for v in Variant if self.calls.kvr_has_variant(v))
        """From the slowest to the fastest."""


class NativeModel:
    """One model's weights and threads inside the library. Used by one thread at a time."""

    def __init__(self, library: Library, shape: Shape, variant: Variant, threads: int) -> None:
        """Raises `NativeError` without memory for the weights, or without the variant."""
        self.shape = shape
        self.variant = variant
        self.width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        """Of the queries, keys and values of a token."""
        self._calls = library.calls
        self._handle: int | None = self._calls.kvr_create(ctypes.byref(shape), variant, threads)
        if self._handle is None:
            raise NativeError(f"no memory for the weights, or no {variant.name} here")
        self._progress = self._calls.kvr_progress(self._handle)
        self._rope: Floats | None = None
        self.draw_memory = Memory(self._calls.kvr_draw_memory(self._handle))
        """What draws work in. A thread's piece begins with the float64 weights of its last row."""
        self._logits = Memory(0)
        self._args = StepArgs()
        """Of steps that draw, which are the frequent ones."""

    def close(self) -> None:
        """Ends the threads and frees the weights. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls.kvr_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    @property
    def progress(self) -> int:
        """Layers computed so far. Only while the model is open."""
        return int(self._progress[0])

    def times_ns(self) -> dict[str, int]:
        """What the caller's thread spent in each kind of phase, waiting for the others included."""
        three = (ctypes.c_int64 * 3)()
        self._calls.kvr_times(self._handle, three)
        return dict(zip(("products", "attention", "rest"), three, strict=True))

    def set(self, slot: Slot, layer: int, address: int, shape: tuple[int, int]) -> None:
        """Copy and pack a dense tensor: a matrix in the model's dtype, a vector [1, n] in float32.

        Raises `NativeError` when the model has no such tensor, or not in this shape.
        """
        self._check(self._calls.kvr_set(self._handle, slot, layer, address, *shape))

    def set_rope(self, table: Floats) -> None:
        """table [P, 2, D/2]: cosine and sine by position. It is kept, not copied."""
        assert table.dtype == np.float32 and table.flags.c_contiguous, table.dtype
        positions = len(table)
        self._rope = table
        shape = (positions, table.size // positions)
        self.set(Slot.ROPE, 0, table.ctypes.data, shape)

    def step(self, batch: Batch, pool: Pool) -> Floats:
        """Compute the step, write its keys and values, and give [wanted, V] logits.

        Raises `NativeError` for a token, position or block that does not exist; nothing is written
        then.
        """
        logits = np.empty((len(batch.wanted), self.shape.vocab), np.float32)
        args = StepArgs(logits=logits.ctypes.data)
        args.put(batch, pool, self.shape.block_size)
        self._check(self._calls.kvr_step(self._handle, ctypes.byref(args)))
        return logits

    def step_and_draw(
        self, batch: Batch, pool: Pool, drawing: Drawing, *, alone: bool = False
    ) -> None:
        """As `step`, and draw each wanted row's token in the same call; the logits stay inside.

        `alone`: by the caller's thread, and none of the model's other ones.
        """
        rows = min(len(batch.wanted), LOGIT_ROWS)
        size = rows * self.shape.vocab * 4
        if self._logits.bytes < size:  # kept: new pages cost more than the draws
            self._logits = Memory(size)
            self._args.logits = self._logits.address
        self._args.put(batch, pool, self.shape.block_size)
        self._args.alone, self._args.logit_rows = alone, rows
        drawing.put(self._args, self.draw_memory)
        self._check(self._calls.kvr_step(self._handle, ctypes.byref(self._args)))

    def draw(self, logits: Floats, draws: Sequence[Draw]) -> Drawing:
        """The draws of a step alone, from logits [wanted, V]."""
        drawing = Drawing(draws)
        self.draw_again(logits, drawing)
        return drawing

    def draw_again(self, logits: Floats, drawing: Drawing) -> None:
        """The same draws once more."""
        own = np.array(logits, np.float32, order="C")  # they are edited
        assert own.shape == (len(drawing.drawn) // 2, self.shape.vocab), own.shape
        args = StepArgs(wanted=len(own), logits=own.ctypes.data, logit_rows=len(own))
        drawing.put(args, self.draw_memory)
        self._check(self._calls.kvr_draw_rows(self._handle, ctypes.byref(args)))

    def linear(self, slot: Slot, layer: int, x: Floats) -> Floats:
        """One matrix of a step alone, x [T, in] -> [T, out]; see `kvr_linear` for the slots."""
        inputs, outputs = self._ends(slot)
        assert x.dtype == np.float32 and x.shape[1] == inputs and x.flags.c_contiguous, x.shape
        out = np.empty((len(x), outputs), np.float32)
        self._check(
            self._calls.kvr_linear(
                self._handle, slot, layer, x.ctypes.data, len(x), out.ctypes.data
            )
        )
        return out

    def attention(self, batch: Batch, pool: Pool, layer: int, qkv: Floats) -> Floats:
        """Rotate, write and attend alone: qkv [T, (Hq + 2 Hk) * D] -> [T, Hq * D]."""
        assert qkv.dtype == np.float32 and qkv.flags.c_contiguous, qkv.dtype
        assert qkv.shape == (len(batch.tokens), self.width), qkv.shape
        mix = np.empty((len(qkv), self.shape.heads * self.shape.head_dim), np.float32)
        args = StepArgs()
        args.put(batch, pool, self.shape.block_size)
        self._check(
            self._calls.kvr_attention(
                self._handle, ctypes.byref(args), layer, qkv.ctypes.data, mix.ctypes.data
            )
        )
        return mix

    def _ends(self, slot: Slot) -> tuple[int, int]:
        shape, mixed = self.shape, self.shape.heads * self.shape.head_dim
        return {
            Slot.Q: (shape.hidden, self.width),
            Slot.ATTENTION_OUT: (mixed, shape.hidden),
            Slot.GATE: (shape.hidden, shape.intermediate),
            Slot.DOWN: (shape.intermediate, shape.hidden),
            Slot.HEAD: (shape.hidden, shape.vocab),
        }[slot]

    def _check(self, status: int) -> None:
        if status:
            raise NativeError(_COMPLAINTS[status])
