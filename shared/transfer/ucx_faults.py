"""Keeps a peer's death from killing this process.

Reading the memory of a process that has just died fails. On an endpoint without error handling
(the only kind that shared memory has) UCX logs that as fatal, and its default log handler aborts
the process: killing a prefill worker in mid-transfer would take the decode worker with it. The
failed read is also reported as the error of its receive, which is all that we need. So exactly this
record is taken from UCX's log before the default handler sees it, and along with it the complaints
about a peer that was gone when its endpoint was closed; every other record goes its way.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Final

_log = logging.getLogger(__name__)

_FATAL: Final = 0
_ERROR: Final = 1
_STOP: Final = 0
_CONTINUE: Final = 1
_HANDLED: Final = (
    (_FATAL, b"cma_ep.c", b"%s(pid=%d"),
    (_ERROR, b"flush.c", b"error during flush"),
    (_ERROR, b"endpoint.cpp", b"Error while closing endpoint"),
)
_HANDLER = ctypes.CFUNCTYPE(
    ctypes.c_int,  # whether the next handler sees the record
    ctypes.c_char_p,  # source file
    ctypes.c_uint,  # line
    ctypes.c_char_p,  # function
    ctypes.c_int,  # level
    ctypes.c_void_p,  # component
    ctypes.c_char_p,  # message format
    ctypes.c_void_p,  # va_list: an array or a large struct, so a pointer in both 64-bit ABIs
)


class UcxFaults:
    """While installed, a failed read of a peer's memory is an error of that receive and no more."""

    def __init__(self) -> None:
        self._ucs: Any = ctypes.CDLL("libucs.so.0")  # the one that the UCX module has loaded
        self._handler = _HANDLER(_on_record)
        self._ucs.ucs_log_push_handler(self._handler)

    def close(self) -> None:
        self._ucs.ucs_log_pop_handler()


def _on_record(
    file: bytes, line: int, _function: bytes, level: int, _component: int, form: bytes, _args: int
) -> int:
    for handled_level, source, words in _HANDLED:
        if level == handled_level and file.endswith(source) and words in form:
            _log.info("a peer went away (UCX %s:%d)", source.decode(), line)
            return _STOP
    return _CONTINUE
