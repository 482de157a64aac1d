"""The address of a `ucx` transport: the UCX worker's own, with what we have to know beside it.

magic 4 | host token 16 | crc32 of the rest 4 | start 8 | UCX worker address

`start` is random: a UCX worker that starts over has another address.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import Final

from kvrelay.shared.errors import TransferError
from kvrelay.shared.transfer.protocol import Address

SCHEME: Final = "ucx"
_ADDRESS: Final = struct.Struct("<4s16sI")
_ADDRESS_MAGIC: Final = b"KVU2"
_START_BYTES: Final = 8


def host_token() -> bytes:
    """Equal for two processes that can read each other's memory: one kernel, namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "ipc")]
    return hashlib.blake2b(repr((boot, spaces, os.getuid())).encode(), digest_size=16).digest()


def pack_address(worker: bytes) -> bytes:
    """The `Address.value` of a UCX worker in this process."""
    rest = secrets.token_bytes(_START_BYTES) + worker
    return _ADDRESS.pack(_ADDRESS_MAGIC, host_token(), zlib.crc32(rest)) + rest


def unpack_address(address: Address) -> tuple[bytes, bytes]:
    """(host token, worker address). UCX would crash on a damaged one, so it never sees one."""
    if address.scheme != SCHEME:
        raise TransferError(f"a {address.scheme} address cannot be reached over ucx")
    if len(address.value) < _ADDRESS.size + _START_BYTES:
        raise TransferError("a ucx address that is cut short")
    magic, host, crc = _ADDRESS.unpack_from(address.value)
    rest = address.value[_ADDRESS.size :]
    if magic != _ADDRESS_MAGIC or crc != zlib.crc32(rest):
        raise TransferError("a ucx address that is damaged or of another version")
    return host, rest[_START_BYTES:]
