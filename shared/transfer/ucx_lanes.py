"""Which of UCX's transports an endpoint really uses; the Python library has no call for it."""

from __future__ import annotations

import ctypes
from typing import Any, Final

_TRANSPORTS: Final = 1 << 3
_MOST: Final = 32


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """`ucp_ep_attr_t`: a mask says which of its parts are asked for."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_uint64 * 16),
        ("remote_address", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


def lanes(endpoint: Any) -> tuple[str, ...]:
    """Names like `posix` or `tcp/eth0`, sorted; empty where this UCX cannot tell."""
    handle = getattr(endpoint, "ucp_endpoint", None)
    if not isinstance(handle, int):
        return ()
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query  # the one that the UCX module has loaded
    except (OSError, AttributeError):
        return ()
    entries = (_Entry * _MOST)()
    asked = _Attributes(field_mask=_TRANSPORTS, num_entries=_MOST)
    asked.entries = ctypes.cast(entries, ctypes.POINTER(_Entry))
    asked.entry_size = ctypes.sizeof(_Entry)
    query.argtypes, query.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    if query(handle, ctypes.addressof(asked)) != 0:
        return ()
    return tuple(sorted({_name(entries[i]) for i in range(asked.num_entries)}))


def _name(entry: _Entry) -> str:
    transport, device = entry.transport.decode(), (entry.device or b"").decode()
    return f"{transport}/{device}" if device not in ("", "memory") else transport
