"""What can happen to a message on its way, as data, and who decides it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.shared.chaos.decide import Chaos, Hit
from kvrelay.shared.chaos.plan import Fault, Step
from kvrelay.shared.transfer.protocol import Address

_HEADER_MARK = 0xFFFF
"""The low bits of a header's tag (`wire.header_tag`)."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message under way."""

    sender: Address
    receiver: Address
    tag: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message."""

    copies: int = 1
    """0 loses it, 2 delivers it twice."""
    delay_s: float = 0.0
    overtaken: bool = False
    """Later messages of the same link do not wait for its delay."""
    keep_bytes: int | None = None
    """Deliver only so many of its first bytes."""
    flip_bit: int | None = None


FaultPlan: TypeAlias = Callable[[Message], Fate]


def no_faults(message: Message) -> Fate:
    return Fate()


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often, in 0..1 of all messages, each fault happens."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0
    flip: float = 0.0
    max_delay_s: float = 0.05


def seeded_faults(seed: int, rates: FaultRates) -> FaultPlan:
    """A plan that depends on the seed and the order of messages alone."""
    rng = random.Random(seed)

    def decide(message: Message) -> Fate:
        # Every message draws the same numbers, so that one rate does not shift another's faults.
        hits = [
            rng.random() < rate
            for rate in (
                rates.drop,
                rates.duplicate,
                rates.delay,
                rates.reorder,
                rates.truncate,
                rates.flip,
            )
        ]
        delay, place = rng.random() * rates.max_delay_s, rng.random()
        drop, duplicate, late, overtaken, truncate, flip = hits
        size = len(message.data)
        return Fate(
            copies=0 if drop else 2 if duplicate else 1,
            delay_s=delay if late or overtaken else 0.0,
            overtaken=overtaken,
            keep_bytes=int(place * size) if truncate and size else None,
            flip_bit=int(place * size * 8) if flip and size else None,
        )

    return decide


def planned_faults(chaos: Chaos) -> FaultPlan:
    """What a chaos plan says of the messages of chunks."""

    def decide(message: Message) -> Fate:
        hit = chaos.at(chunk_step(message.tag))
        return Fate() if hit is None else fate_of(hit, len(message.data))

    return decide


def chunk_step(tag: int) -> Step:
    return Step.CHUNK_HEADER if tag & _HEADER_MARK == _HEADER_MARK else Step.CHUNK_BODY


def fate_of(hit: Hit, size: int) -> Fate:
    """Of a message of `size` bytes."""
    if hit.fault is Fault.DROP:
        return Fate(copies=0)
    if hit.fault is Fault.DUPLICATE:
        return Fate(copies=2)
    if hit.fault is Fault.TRUNCATE and size:
        return Fate(keep_bytes=int(hit.place * size))
    if hit.fault is Fault.FLIP and size:
        return Fate(flip_bit=int(hit.place * size * 8))
    return Fate(delay_s=hit.delay_s, overtaken=hit.fault is Fault.REORDER)


def damaged(data: bytes | memoryview, fate: Fate) -> bytes:
    out = bytearray(data)
    if fate.flip_bit is not None:
        out[fate.flip_bit // 8] ^= 1 << fate.flip_bit % 8
    return bytes(out[: fate.keep_bytes])
