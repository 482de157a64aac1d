"""The relay's wire format: one fixed header per chunk, its tags, its checksum, and block runs.

A chunk is a header message of `HEADER_BYTES` under `header_tag(sender)`, then one message for each
of its pieces, in order, all under `body_tag(nonce, chunk)`. A piece is a run of blocks that is
contiguous in both pools, so it leaves one memory and lands in the other without a copy between.

Header, little-endian, `HEADER_BYTES` long; unused bytes are zero:

    magic 4 | version 2 | kind 1 | flags 1 | attempt 4 | nonce 8 | chunk 2 | leg length 1 | leg 80
    sender 16 | receiver 16 | token start 4 | token end 4 | blocks 2 | piece map 64
    body bytes 8 | body checksum 8 | token 4 | index 4 | finish 1 | padding | crc32 of all before 4

A probe is a header of kind 2 under the same tag, and unless it is empty one body message:

    magic 4 | version 2 | kind 1 | 0 | sender 16 | receiver 16 | nonce 8 | body bytes 4
    body checksum 8 | padding | crc32 of all before 4

Bit i of the piece map is set where block i starts a piece.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import xxhash

from kvrelay.shared.errors import CorruptFrame
from kvrelay.shared.kv.runs import run_lengths
from kvrelay.shared.transfer.protocol import Buffer
from kvrelay.shared.types import FinishReason, Incarnation, LegRef

MAGIC: Final = b"KVRC"
VERSION: Final = 1
HEADER_BYTES: Final = 256
MAX_LEG_BYTES: Final = 80
MAX_CHUNKS: Final = 0xFFFF
"""Chunk numbers are below this; the number itself marks header tags."""
MAX_CHUNK_BLOCKS: Final = 512
MAX_NONCE: Final = 2**48 - 1
MAX_BODY_BYTES: Final = 2**48
MAX_PROBE_BYTES: Final = 2**20

_KIND_CHUNK: Final = 1
_KIND_PROBE: Final = 2
_FLAG_LAST: Final = 1
_FINISH: Final[tuple[FinishReason | None, ...]] = (None, FinishReason.STOP, FinishReason.LENGTH)
_PREFIX: Final = struct.Struct("<4sH")
_FIELDS: Final = struct.Struct(f"<4sHBBIQHB{MAX_LEG_BYTES}s16s16sIIH{MAX_CHUNK_BLOCKS // 8}sQQIIB")
_PROBE: Final = struct.Struct("<4sHBB16s16sQIQ")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = HEADER_BYTES - _CRC.size


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled: what decode continues from."""

    token: int
    index: int
    """Its output index: 0, or more when the leg continues an answer the client has begun to see."""
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk is and what its body must be. `first` is there exactly on the last chunk."""

    ref: LegRef
    sender: Incarnation
    receiver: Incarnation
    chunk: int
    token_start: int
    token_end: int
    """Positions [token_start, token_end) of the leg are in the body."""
    pieces: tuple[int, ...]
    """Blocks in each body message, in order; empty when the body is."""
    body_bytes: int
    body_checksum: int
    """`checksum` of the body's messages in order."""
    first: FirstToken | None = None

    @property
    def last(self) -> bool:
        return self.first is not None

    @property
    def blocks(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True, slots=True)
class ProbeHeader:
    """A question whether the lane works; its body belongs to no attempt and to no block."""

    sender: Incarnation
    receiver: Incarnation
    nonce: int
    body_bytes: int
    body_checksum: int


def encode_probe(header: ProbeHeader) -> bytes:
    """The header's bytes."""
    fields = _PROBE.pack(
        MAGIC,
        VERSION,
        _KIND_PROBE,
        0,
        bytes.fromhex(header.sender),
        bytes.fromhex(header.receiver),
        header.nonce,
        header.body_bytes,
        header.body_checksum,
    ).ljust(_CRC_AT, b"\0")
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_frame(buffer: Buffer) -> ChunkHeader | ProbeHeader:
    """Whatever comes under a header tag. Raises `CorruptFrame` for any other bytes."""
    data = bytes(buffer)
    _check_frame(data)
    _, _, kind, _, sender, receiver, nonce, body_bytes, body_checksum = _PROBE.unpack_from(data)
    if kind != _KIND_PROBE:
        return decode_header(data)
    names = Incarnation(sender.hex()), Incarnation(receiver.hex())
    header = ProbeHeader(*names, nonce, body_bytes, body_checksum)
    if nonce > MAX_NONCE or body_bytes > MAX_PROBE_BYTES or encode_probe(header) != data:
        raise CorruptFrame(
            f"a probe of {body_bytes} bytes: more than {MAX_PROBE_BYTES}, or damaged"
        )
    return header


def encode_header(header: ChunkHeader) -> bytes:
    """The header's bytes. Raises `ValueError` naming the field that does not fit."""
    problem = _problem(header)
    if problem is not None:
        raise ValueError(f"chunk header: {problem}")
    leg, first = header.ref.leg.encode(), header.first
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        _KIND_CHUNK,
        _FLAG_LAST if first else 0,
        header.ref.attempt,
        header.ref.nonce,
        header.chunk,
        len(leg),
        leg,
        bytes.fromhex(header.sender),
        bytes.fromhex(header.receiver),
        header.token_start,
        header.token_end,
        header.blocks,
        _piece_map(header.pieces),
        header.body_bytes,
        header.body_checksum,
        first.token if first else 0,
        first.index if first else 0,
        _FINISH.index(first.finish) if first else 0,
    ).ljust(_CRC_AT, b"\0")
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_header(buffer: Buffer) -> ChunkHeader:
    """The header that `encode_header` made. Raises `CorruptFrame` for any other bytes."""
    data = bytes(buffer)
    _check_frame(data)
    (_, _, kind, flags, attempt, nonce, chunk, leg_bytes, leg, sender, receiver, *rest) = (
        _FIELDS.unpack_from(data)
    )
    start, end, blocks, piece_map, body_bytes, body_checksum, token, index, finish = rest
    if kind != _KIND_CHUNK or flags & ~_FLAG_LAST or finish >= len(_FINISH):
        raise CorruptFrame(f"chunk header: unknown kind {kind}, flags {flags} or finish {finish}")
    header = ChunkHeader(
        ref=LegRef(leg[:leg_bytes].decode(errors="replace"), attempt, nonce),
        sender=Incarnation(sender.hex()),
        receiver=Incarnation(receiver.hex()),
        chunk=chunk,
        token_start=start,
        token_end=end,
        pieces=_pieces(piece_map, blocks),
        body_bytes=body_bytes,
        body_checksum=body_checksum,
        first=FirstToken(token, index, _FINISH[finish]) if flags & _FLAG_LAST else None,
    )
    problem = _problem(header)
    # Encoding again proves that every byte meant something: no stray length, bit or padding.
    if problem is not None or encode_header(header) != data:
        raise CorruptFrame(f"chunk header: {problem or 'not in canonical form'}")
    return header


def _check_frame(data: bytes) -> None:
    if len(data) != HEADER_BYTES:
        raise CorruptFrame(f"chunk header has {len(data)} bytes, not {HEADER_BYTES}")
    magic, version = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFrame(f"chunk header starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CorruptFrame(f"chunk header has wire version {version}; this side speaks {VERSION}")
    if _CRC.unpack_from(data, _CRC_AT)[0] != zlib.crc32(data[:_CRC_AT]):
        raise CorruptFrame("chunk header does not match its own checksum")


def _problem(header: ChunkHeader) -> str | None:
    """What keeps the header from being sent: field, limit and value; None if nothing does."""
    first = header.first or FirstToken(0, 0)
    for name, value, limit in (
        ("attempt", header.ref.attempt, 2**32 - 1),
        ("nonce", header.ref.nonce, MAX_NONCE),
        ("chunk", header.chunk, MAX_CHUNKS - 1),
        ("token_end", header.token_end, 2**32 - 1),
        ("token_start", header.token_start, header.token_end),
        ("blocks", header.blocks, MAX_CHUNK_BLOCKS),
        ("body_bytes", header.body_bytes, MAX_BODY_BYTES),
        ("body_checksum", header.body_checksum, 2**64 - 1),
        ("first.token", first.token, 2**32 - 1),
        ("first.index", first.index, 2**32 - 1),
        ("leg bytes", len(header.ref.leg.encode()), MAX_LEG_BYTES),
    ):
        if not 0 <= value <= limit:
            return f"{name} must be between 0 and {limit}, got {value}"
    if any(piece < 1 for piece in header.pieces):
        return f"pieces must be at least 1 block each, got {header.pieces}"
    if (header.blocks == 0) != (header.body_bytes == 0):
        return f"{header.blocks} blocks cannot be {header.body_bytes} body bytes"
    if header.blocks and header.body_bytes % header.blocks:
        return f"body_bytes {header.body_bytes} is no multiple of {header.blocks} blocks"
    return _name_problem("sender", header.sender) or _name_problem("receiver", header.receiver)


def _name_problem(field: str, incarnation: str) -> str | None:
    if len(incarnation) == 32 and set(incarnation) <= set("0123456789abcdef"):
        return None
    return f"{field} must be 32 hex digits, got {incarnation[:40]!r}"


def _piece_map(pieces: Sequence[int]) -> bytes:
    bits = 0
    for start in accumulate(pieces[:-1], initial=0) if pieces else ():
        bits |= 1 << start
    return bits.to_bytes(MAX_CHUNK_BLOCKS // 8, "little")


def _pieces(piece_map: bytes, blocks: int) -> tuple[int, ...]:
    """Piece lengths; a map that does not start at block 0 comes out as one that differs."""
    bits = int.from_bytes(piece_map, "little")
    starts = [block for block in range(min(blocks, MAX_CHUNK_BLOCKS)) if bits >> block & 1]
    return tuple(after - start for start, after in zip(starts, [*starts[1:], blocks], strict=False))


def header_tag(sender_incarnation: str) -> int:
    """The tag of all chunk headers of one sender: its incarnation's first 48 bits, then 0xFFFF."""
    return int(sender_incarnation[:12], 16) << 16 | 0xFFFF


def body_tag(nonce: int, chunk: int) -> int:
    """The tag of one chunk's body messages. Raises `ValueError` beyond 48 + 16 bits."""
    if not (0 <= nonce <= MAX_NONCE and 0 <= chunk < MAX_CHUNKS):
        raise ValueError(f"no tag for nonce {nonce} (48 bits), chunk {chunk} (below {MAX_CHUNKS})")
    return nonce << 16 | chunk


def attempt_tags(nonce: int) -> tuple[int, int]:
    """The first and the last tag of all body messages of one attempt."""
    return body_tag(nonce, 0), body_tag(nonce, MAX_CHUNKS - 1)


def checksum(buffers: Iterable[Buffer]) -> int:
    """XXH3, 64 bits, over the buffers as if they were one. Faster than memcpy; releases the GIL."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def common_runs(source: Sequence[int], destination_runs: Sequence[int]) -> list[int]:
    """Lengths of the pieces that are contiguous at both ends: each is one message.

    `source` are the sender's block ids, `destination_runs` the receiver's run lengths over the same
    blocks. Raises `ValueError` if the two do not cover the same number of blocks.

        source            4 5 6 7 | 9 10        runs 4, 2
        destination       . . | . . . .         runs 2, 4
        pieces            . . | . . | . .       2, 2, 2
    """
    if any(run < 1 for run in destination_runs) or sum(destination_runs) != len(source):
        raise ValueError(f"runs {list(destination_runs)} do not cover {len(source)} blocks")
    ends = sorted({*accumulate(run_lengths(source)), *accumulate(destination_runs)})
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
