"""What a router remembers of a request: its spans over all processes, and why it went as it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool


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
    ttft_s: float | None
    duration_s: float | None
    spans: tuple[SpanRecord, ...] = ()
    why: str = ""
