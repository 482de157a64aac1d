"""A lease renewed while its process rests, by native code where that was built (`rest.cpp`)."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path
from typing import Final

LIBRARY: Final = Path(__file__).with_name("librest.so")


class Outcome(IntEnum):
    """Why a rest ended."""

    STIRRED = 0
    """`turns` changed, or `stop` can be read."""
    ANSWERED = 1
    """Redis said something else: ask again, and look at it."""
    BROKEN = 2
    """The connection failed, or a rest ended in the middle of an exchange: close it."""


class Rest:
    """Raises `OSError` where there is no library: then each renewal is made in Python."""

    def __init__(self, period_ns: int, timeout_s: float, stop: int) -> None:
        """Renewals begin at multiples of `period_ns` of the monotonic clock; `stop`: a pipe."""
        self._function = ctypes.CDLL(str(LIBRARY)).kvrelay_rest
        self._function.argtypes = (
            *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p),
            *(ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.POINTER(ctypes.c_int64), ctypes.c_int64),
        )
        self._period_ns = period_ns
        self._timeout_ns = int(timeout_s * 1e9)
        self._stop = stop

    def until_stirred(
        self, fd: int, renewal: bytes, usual: bytes, turns: ctypes.c_int64, turn: int
    ) -> tuple[Outcome, int]:
        """Renew while `turns` is `turn` and Redis answers `usual`.

        Also returns when the last renewal began, in ns of the monotonic clock; 0: there was none.
        """
        renewed_ns = ctypes.c_int64(0)
        outcome = self._function(
            *(fd, self._stop, renewal, usual, ctypes.byref(turns), turn),
            *(self._period_ns, self._timeout_ns, ctypes.byref(renewed_ns), len(renewal)),
        )
        return Outcome(outcome), renewed_ns.value
