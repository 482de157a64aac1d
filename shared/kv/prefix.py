"""Names for prefix blocks: a chained digest over a block's tokens and everything before it.

The digest is cryptographic and has no per-process seed, so router and workers agree on it, restarts
included. Every chain begins at a root that says whose KV it names: KV of other weights, or of
another tenant's `cache_salt`, can never be found.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16


def group_of(fingerprint: Mapping[str, str]) -> bytes:
    """What `chain_root` takes as the group of all workers of this fingerprint."""
    return repr(sorted(fingerprint.items())).encode()


def chain_root(group: bytes, cache_salt: str = "") -> BlockHash:
    """Where the chains of one fingerprint group and one `cache_salt` begin."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"root")
    digest.update(len(group).to_bytes(8, "little"))  # or ("ab", "c") and ("a", "bc") were one
    digest.update(group)
    digest.update(cache_salt.encode())
    return BlockHash(digest.digest())


def extend_hashes(
    hashes: list[BlockHash], tokens: Sequence[int], block_size: int, root: BlockHash
) -> None:
    """Append the digests of the full blocks of `tokens` that `hashes` does not cover yet.

    Entry i names the prefix of (i + 1) blocks.
    """
    parent: bytes = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        digest = blake2b(parent, digest_size=HASH_BYTES)
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        parent = digest.digest()
        hashes.append(BlockHash(parent))
