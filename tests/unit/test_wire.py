"""The relay's wire format: what was sent comes back, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.shared.errors import CorruptFrame
from kvrelay.shared.kv.runs import run_lengths
from kvrelay.shared.transfer import wire
from kvrelay.shared.transfer.wire import ChunkHeader, FirstToken
from kvrelay.shared.types import FinishReason, Incarnation, LegRef

SENDER = Incarnation("0123456789abcdef" * 2)
RECEIVER = Incarnation("fedcba9876543210" * 2)
HEADER = ChunkHeader(
    ref=LegRef("req-1/0", attempt=2, nonce=0xABCDEF012345),
    sender=SENDER,
    receiver=RECEIVER,
    chunk=3,
    token_start=48,
    token_end=144,
    pieces=(4, 1, 1),
    body_bytes=6 * 1024,
    body_checksum=2**64 - 5,
    first=FirstToken(token=151_000, index=0, finish=FinishReason.LENGTH),
)

incarnations = st.binary(min_size=16, max_size=16).map(lambda b: Incarnation(b.hex()))
u32 = st.integers(0, 2**32 - 1)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    pieces = tuple(draw(st.lists(st.integers(1, 20), max_size=25)))
    start, end = sorted((draw(u32), draw(u32)))
    first = st.builds(FirstToken, u32, u32, st.sampled_from([None, *FinishReason]))
    return ChunkHeader(
        ref=LegRef(draw(st.text("abc/é", max_size=40)), draw(u32), draw(st.integers(0, 2**48 - 1))),
        sender=draw(incarnations),
        receiver=draw(incarnations),
        chunk=draw(st.integers(0, 0xFFFE)),
        token_start=start,
        token_end=end,
        pieces=pieces,
        body_bytes=sum(pieces) * draw(st.integers(1, 2**30)),
        body_checksum=draw(st.integers(0, 2**64 - 1)),
        first=draw(st.none() | first),
    )


@given(headers())
def test_a_header_survives_the_wire(header: ChunkHeader) -> None:
    data = wire.encode_header(header)
    assert len(data) == 256
    assert wire.decode_header(memoryview(data)) == header


def test_the_layout_is_fixed() -> None:
    data = wire.encode_header(HEADER)
    assert data[:8] == b"KVRC\x01\x00\x01\x01"
    assert struct.unpack_from("<IQHB", data, 8) == (2, 0xABCDEF012345, 3, 7)
    assert data[23:30] == b"req-1/0"
    assert data[103:135] == bytes.fromhex(SENDER + RECEIVER)
    assert struct.unpack_from("<IIHB", data, 135) == (48, 144, 6, 0b110001)
    assert struct.unpack_from("<QQIIB", data, 209) == (6144, 2**64 - 5, 151_000, 0, 2)


def test_every_flipped_bit_is_noticed() -> None:
    data = wire.encode_header(HEADER)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            wire.decode_header(flipped)


def test_every_truncation_and_extension_is_noticed() -> None:
    data = wire.encode_header(HEADER)
    for size in range(len(data)):
        with pytest.raises(CorruptFrame, match=f"has {size} bytes, not 256"):
            wire.decode_header(data[:size])
    with pytest.raises(CorruptFrame, match="has 257 bytes"):
        wire.decode_header(data + b"\0")


def resealed(data: bytes, at: int, value: bytes) -> bytes:
    """The header with some bytes replaced and its own checksum right again."""
    fields = (data[:at] + value + data[at + len(value) :])[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_another_version_is_named_beside_ours() -> None:
    data = resealed(wire.encode_header(HEADER), 4, b"\x07\x00")
    with pytest.raises(CorruptFrame, match="wire version 7; this side speaks 1"):
        wire.decode_header(data)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"HTTP", "starts with b'HTTP'"),
        (6, b"\x02", "unknown kind 2"),
        (7, b"\x03", "flags 3"),
        (12, b"\xff" * 8, "nonce must be between 0 and 281474976710655"),
        (20, b"\xff\xff", "chunk must be between 0 and 65534, got 65535"),
        (22, b"\xff", "canonical"),
        (23, b"\xff", "leg bytes|canonical"),
        (135, b"\xff\xff\xff\xff", "token_start must be between 0 and 144, got 4294967295"),
        (143, b"\xff\xff", "blocks must be between 0 and 512, got 65535"),
        (145, b"\x30", "canonical|multiple"),
        (209, b"\xff" * 8, "body_bytes must be between 0 and"),
        (233, b"\x03", "finish 3"),
        (240, b"\x01", "canonical"),
    ],
)
def test_a_lie_with_a_right_checksum_is_noticed(at: int, value: bytes, message: str) -> None:
    with pytest.raises(CorruptFrame, match=message):
        wire.decode_header(resealed(wire.encode_header(HEADER), at, value))


@given(st.binary(min_size=256, max_size=256))
def test_noise_is_never_a_header(noise: bytes) -> None:
    with pytest.raises(CorruptFrame):
        wire.decode_header(resealed(b"KVRC\x01\x00" + noise[6:], 6, b""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0xFFFF}, "chunk must be between 0 and 65534, got 65535"),
        ({"token_start": -1}, "token_start must be between 0 and 144, got -1"),
        ({"token_start": 145}, "token_start must be between 0 and 144, got 145"),
        ({"pieces": (500, 13)}, "blocks must be between 0 and 512, got 513"),
        ({"pieces": (6, 0)}, "pieces must be at least 1 block each"),
        ({"body_bytes": 6145}, "body_bytes 6145 is no multiple of 6 blocks"),
        ({"pieces": ()}, "0 blocks cannot be 6144 body bytes"),
        ({"sender": "xyz"}, "sender must be 32 hex digits, got 'xyz'"),
        ({"ref": LegRef("x" * 81, 0, 0)}, "leg bytes must be between 0 and 80, got 81"),
        ({"ref": LegRef("x", 0, 2**48)}, "nonce must be between 0 and 281474976710655"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_by_field(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        wire.encode_header(dataclasses.replace(HEADER, **change))  # type: ignore[arg-type]


def test_tags_of_headers_and_bodies_never_meet() -> None:
    assert wire.header_tag(SENDER) == 0x0123456789ABFFFF
    assert wire.body_tag(0x0123456789AB, 0xFFFE) == 0x0123456789ABFFFE
    with pytest.raises(ValueError, match="chunk 65535"):
        wire.body_tag(0x0123456789AB, 0xFFFF)
    with pytest.raises(ValueError, match="nonce"):
        wire.body_tag(2**48, 0)


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_the_checksum_does_not_see_where_pieces_end(parts: list[bytes]) -> None:
    assert wire.checksum(parts) == wire.checksum([memoryview(b"".join(parts))])


def test_the_checksum_is_xxh3() -> None:
    assert wire.checksum([]) == 0x2D06800538D394C2
    assert wire.checksum([b"ab", bytearray(b"c")]) == 0x78AF5F94892F3950


def test_runs_are_maximal() -> None:
    assert run_lengths([]) == []
    assert run_lengths([4, 5, 6, 9, 8, 9]) == [3, 1, 2]


def test_common_runs_cut_where_either_side_jumps() -> None:
    assert wire.common_runs([4, 5, 6, 7, 9, 10], [2, 4]) == [2, 2, 2]
    assert wire.common_runs([], []) == []
    with pytest.raises(ValueError, match="do not cover 2 blocks"):
        wire.common_runs([1, 2], [3])
    with pytest.raises(ValueError, match="do not cover"):
        wire.common_runs([1, 2], [2, 0])


blocks = st.lists(st.integers(0, 12), max_size=30)


@given(blocks, st.data())
def test_common_runs_are_contiguous_on_both_sides_and_maximal(
    source: list[int], data: st.DataObject
) -> None:
    size = st.lists(st.integers(0, 12), min_size=len(source), max_size=len(source))
    destination = data.draw(size)
    pieces = wire.common_runs(source, run_lengths(destination))
    ends = list(accumulate(pieces))
    assert sum(pieces) == len(source)
    for position in range(1, len(source)):
        joined = all(side[position] == side[position - 1] + 1 for side in (source, destination))
        assert (position in ends) == (not joined)
