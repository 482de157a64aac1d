"""What a router remembers of a request: its spans over all processes, and why it went as it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What a worker did for an attempt, on its own monotonic clock."""

    name: str
    start_ns: int
    end_ns: int
    parent: int = 0
    """Its place among the attempt's pieces, the first of which has all the others in it."""
    tokens: int = 0
    """That it was about, where it was about some."""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One piece of a request's time, on the router's monotonic clock."""

    name: str
    part: str
    """`router`, or a worker's name."""
    start_ns: int
    end_ns: int | None
    """None while it lasts."""
    parent: int | None = None
    """Its place among the record's spans."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, in flight or ended."""

    id: str
    trace_id: str
    endpoint: str
    model: str
    received_s: float
    """Wall clock."""
    received_ns: int
    outcome: str | None
    """None while it is in flight."""
    route: str
    """Its kind; "" before one was chosen."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    """One, and each that replaced another, of whichever choice; 0 before the first."""
    ttft_s: float | None
    duration_s: float | None
    spans: tuple[SpanRecord, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """When a router sent an attempt to a worker and heard of its end; the worker's time then."""

    sent_ns: int
    heard_ns: int
    told_ns: int

    def offset_ns(self, begun_ns: int) -> int:
        """From the worker's clock, on which it began then, to the router's: both ways took equally
        long."""
        most = self.heard_ns - self.told_ns
        return (most + min(self.sent_ns - begun_ns, most)) // 2


def placed(part: str, pieces: Sequence[Piece], heard: Heard) -> tuple[SpanRecord, ...]:
    """A worker's pieces on the router's clock; the first one's parent is None.

    Whatever its clock says, nothing begins before it was asked for or ends after it was heard of,
    and each piece lies within its parent.
    """
    if not pieces:
        return ()
    offset_ns = heard.offset_ns(pieces[0].start_ns)
    earliest = min(heard.sent_ns, heard.heard_ns)
    spans: list[SpanRecord] = []
    for number, piece in enumerate(pieces):
        parent = min(max(piece.parent, 0), number - 1) if number else None
        low, high = earliest, heard.heard_ns
        if parent is not None:
            low, high = spans[parent].start_ns, spans[parent].end_ns or heard.heard_ns
        start_ns = min(max(piece.start_ns + offset_ns, low), high)
        end_ns = min(max(piece.end_ns + offset_ns, start_ns), high)
        told: dict[str, Value] = {"kvrelay.tokens": piece.tokens} if piece.tokens else {}
        spans.append(SpanRecord(piece.name, part, start_ns, end_ns, parent, told))
    return tuple(spans)
