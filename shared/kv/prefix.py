"""Names for prefix blocks: a chained digest over a block's tokens and everything before it.

The digest is cryptographic and has no per-process seed, so router and workers agree on it, restarts
included. `salt` is the fingerprint group: KV of other weights can never be found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16


def extend_hashes(
    hashes: list[BlockHash], tokens: Sequence[int], block_size: int, salt: bytes
) -> None:
    """Append the digests of the full blocks of `tokens` that `hashes` does not cover yet.

    Entry i names the prefix of (i + 1) blocks.
    """
    parent: bytes = hashes[-1] if hashes else blake2b(salt, digest_size=HASH_BYTES).digest()
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        digest = blake2b(parent, digest_size=HASH_BYTES)
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        parent = digest.digest()
        hashes.append(BlockHash(parent))
