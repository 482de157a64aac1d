"""Which tokens a leg may draw next: a function of its grammar and of the tokens it has.

A matcher is told each token once and in order; whoever has the same tokens has the same mask, on
whichever worker and however often it lost its memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrelay.shared.errors import BadGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WEIGHT = 1 / 16
"""Of the latest mask in the mean: the first of a grammar takes long and is soon made up for."""

Mask: TypeAlias = NDArray[np.uint32]
"""Bit id % 32 of word id // 32 says whether the id may be drawn."""


class Matcher:
    def __init__(self, library: LLMatcher, vocab: int) -> None:
        """`library` at the beginning of the answer; nobody else uses it."""
        self._library = library
        self._mask: Mask = np.zeros(-(-vocab // 32), np.uint32)
        self._masked = -1
        self.tokens = 0
        """How many it was told."""
        self.mean_s = 0.0
        """A mask's computing time, of late."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Raises `BadGrammar` for tokens that the grammar forbids, or where it became too much."""
        if not tokens:
            return
        self._library.consume_tokens(list(tokens))
        self._check()
        self.tokens += len(tokens)

    @property
    def complete(self) -> bool:
        """Nothing but an end can follow."""
        return self._library.is_stopped()

    def mask(self) -> Mask:
        """Of the next token; it holds until the next `advance`. What ends an answer is allowed
        where the grammar accepts what is there. Raises `BadGrammar` where it became too much."""
        if self._masked != self.tokens:
            # Another array each time: the last one may still be read.
            self._mask = np.zeros_like(self._mask)
            begun_s = time.thread_time()
            self._library.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self.mean_s += _WEIGHT * (time.thread_time() - begun_s - self.mean_s)
            self._check()
            self._masked = self.tokens
        return self._mask

    def _check(self) -> None:
        if self._library.is_error():
            said = self._library.get_error().partition("\n")[0]
            raise BadGrammar(f"grammar: the answer cannot go on: {said[:200]}")
