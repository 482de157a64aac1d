"""Takes a checkpoint's tensors one by one: every one present, of the right shape, and used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvrelay.shared.errors import ModelError
from kvrelay.shared.kv.layout import DType
from kvrelay.shared.model.pieces import LARGEST_BF16, Floats, Halves, rounded, within
from kvrelay.shared.model.weights import Weights, follows_from_config

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), the bytes being those of the file."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LARGEST = {"float32": float(np.finfo(np.float32).max), "bfloat16": LARGEST_BF16}


class TensorReader:
    """Reads tensors with a known shape, and knows which were never asked for.

    Different tensors may be read by several threads at once.
    """

    def __init__(self, weights: Weights, dtype: DType, progress: Progress | None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._progress = progress
        self._unread = set(weights.shapes)
        self._done_bytes = 0
        self._all_bytes = sum(weights.stored_bytes.values())
        self._lock = threading.Lock()

    def pieces(self, name: str, *shape: int) -> Iterator[Floats | Halves]:
        """The rows of the tensor, [some, columns], in the compute dtype."""
        limit = _LARGEST[self._dtype]
        for piece in self._checked(name, shape, limit):
            yield piece if self._dtype == "float32" else rounded(piece)

    def tensor(self, name: str, *shape: int) -> Floats | Halves:
        """The whole tensor, of that shape, in the compute dtype."""
        whole = np.empty(shape, np.float32 if self._dtype == "float32" else np.uint16)
        rows, at = whole.reshape(-1, shape[-1]), 0
        for piece in self.pieces(name, *shape):
            rows[at : at + len(piece)] = piece
            at += len(piece)
        return whole

    def floats(self, name: str, *shape: int) -> Floats:
        """The whole tensor in float32, whatever is computed in."""
        pieces = [piece.copy() for piece in self._checked(name, shape, _LARGEST["float32"])]
        return np.concatenate(pieces).reshape(shape)

    def _checked(self, name: str, shape: tuple[int, ...], limit: float) -> Iterator[Floats]:
        stored = self._weights.shapes.get(name)
        if stored is None:
            raise ModelError(f"{self._weights.where} has no tensor {name}")
        if stored != shape:
            raise ModelError(
                f"{self._weights.where}: {name} has the shape {list(stored)}, not {list(shape)}"
            )
        for piece in self._weights.pieces(name):
            if not within(piece, limit):
                raise ModelError(f"{self._weights.where}: {name} holds numbers that are not finite")
            yield piece
        self._count(name)

    def shares_head(self, declared: bool | None) -> bool:
        """Whether the output head is the embedding, which is then held once.

        A head in the file is the head, whatever is declared; often it is the embedding again.
        Without one it is the embedding, unless that is declared otherwise.
        """
        shapes = self._weights.shapes
        if HEAD not in shapes:
            return declared is not False
        if shapes[HEAD] != shapes.get(EMBEDDING):
            return False
        both = zip(self._weights.pieces(HEAD), self._weights.pieces(EMBEDDING), strict=True)
        same = all(np.array_equal(head, embedding) for head, embedding in both)
        if same:
            self._unread.discard(HEAD)
        return same

    def finish(self) -> None:
        """A tensor that this model code would silently leave out makes another model: refuse."""
        left = sorted(name for name in self._unread if not follows_from_config(name))
        if left:
            raise ModelError(
                f"{self._weights.where} has a tensor this model has no use for: {left[0]}"
            )
        if self._progress is not None:
            self._progress(self._all_bytes, self._all_bytes)

    def _count(self, name: str) -> None:
        with self._lock:
            self._unread.discard(name)
            self._done_bytes += self._weights.stored_bytes[name]
            if self._progress is not None:
                self._progress(self._done_bytes, self._all_bytes)
