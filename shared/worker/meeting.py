"""Trying a lane before there is anything to relay: what its set-up, a round trip and a byte cost.

A probe is a header and a body that belong to no attempt; the receiver takes them into memory of
their own and answers with the body's checksum. A visit is a few of them in a row, between which
chunks go first.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from kvrelay.shared.errors import CorruptFrame, PeerLost
from kvrelay.shared.transfer.protocol import Peer, Transport
from kvrelay.shared.transfer.wire import (
    MAX_NONCE,
    MAX_PROBE_BYTES,
    ProbeHeader,
    body_tag,
    checksum,
    encode_probe,
    header_tag,
)
from kvrelay.shared.types import Incarnation

PROBE_DEADLINE_S: Final = 1.0
MAX_ROUNDS: Final = 16
"""Of one visit with full bodies: 16 MiB at most."""
EMPTY_ROUNDS: Final = 4
"""The first sets the lane up, the fastest of the others is a round trip."""
FIRST_VISIT: Final = (MAX_PROBE_BYTES, 2)
"""The first body sets up what large messages need, the second is measured."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a visit found; with a `problem`, the lane does not work and the rest says nothing."""

    problem: str = ""
    setup_ns: int = 0
    round_trip_ns: int = 0
    bytes_per_s: float = 0.0
    carried_by: str = ""


@dataclass(slots=True, eq=False)
class Visit:
    """One that is under way: which probe is next, and what those before it took."""

    body_bytes: int
    rounds: int
    outcome: asyncio.Future[Meeting]
    empty_ns: list[int] = field(default_factory=list)
    full_ns: list[int] = field(default_factory=list)

    @property
    def next_bytes(self) -> int:
        return 0 if len(self.empty_ns) < EMPTY_ROUNDS else self.body_bytes

    @property
    def complete(self) -> bool:
        return len(self.full_ns) == self.rounds

    def took(self, body_bytes: int, elapsed_ns: int) -> None:
        (self.full_ns if body_bytes else self.empty_ns).append(elapsed_ns)

    def end(self, meeting: Meeting) -> None:
        if not self.outcome.done():
            self.outcome.set_result(meeting)

    def found(self, carried_by: str) -> Meeting:
        round_trip_ns = min(self.empty_ns[1:])
        full_ns = min(self.full_ns)
        body_ns = max(full_ns - round_trip_ns, full_ns // 2)  # a round trip may have been slow
        return Meeting(
            "", self.empty_ns[0], round_trip_ns, self.body_bytes * 1e9 / body_ns, carried_by
        )


@cache
def _body() -> tuple[bytes, dict[int, int]]:
    return random.Random(0).randbytes(MAX_PROBE_BYTES), {}


def probe_body(size: int) -> tuple[memoryview, int]:
    """Bytes to send, and their checksum."""
    data, sums = _body()
    view = memoryview(data)[:size]
    if size not in sums:
        sums[size] = checksum([view])
    return view, sums[size]


async def probe(
    transport: Transport, peer: Peer, names: tuple[Incarnation, Incarnation], body_bytes: int
) -> int:
    """One probe from `names[0]` to `names[1]`; the nanoseconds until its answer.

    Raises `PeerLost` when none comes in time, `CorruptFrame` when another body arrived.
    """
    view, expected = probe_body(body_bytes)
    nonce, answer = secrets.randbelow(MAX_NONCE), bytearray(8)
    header = encode_probe(ProbeHeader(*names, nonce, body_bytes, expected))
    begun_ns = time.monotonic_ns()
    receive = asyncio.ensure_future(transport.recv(peer, body_tag(nonce, 1), answer))
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            await transport.send(peer, header_tag(names[0]), header)
            if body_bytes:
                await transport.send(peer, body_tag(nonce, 0), view)
            await receive
    except TimeoutError as error:
        raise PeerLost(f"no answer to a probe within {PROBE_DEADLINE_S:g} s") from error
    finally:
        receive.cancel()
        await asyncio.gather(receive, return_exceptions=True)
    elapsed_ns = time.monotonic_ns() - begun_ns
    if int.from_bytes(answer, "little") != expected:
        raise CorruptFrame(f"a probe of {body_bytes} bytes arrived damaged")
    return elapsed_ns


async def answer_probe(transport: Transport, peer: Peer, header: ProbeHeader) -> None:
    """The receiving half. Raises what the transport raises."""
    body = bytearray(header.body_bytes)
    if body:
        await transport.recv(peer, body_tag(header.nonce, 0), body)
    found = checksum([body]).to_bytes(8, "little")
    await transport.send(peer, body_tag(header.nonce, 1), found)
