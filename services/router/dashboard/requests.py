"""Requests as the page shows them: one line each, and one with all its spans. Never their texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvrelay.shared.telemetry.spans import RequestRecord, SpanRecord

MOST_SPANS: Final = 400
MOST_ATTRIBUTES: Final = 48
MOST_TEXT: Final = 200
MOST_WHY: Final = 4000
SHOWN: Final = ("kvrelay.", "gen_ai.", "error.", "server.")
"""How the names of attributes begin that are shown; and of them none that carries content."""
CONTENT: Final = (".messages", ".content", ".prompt", ".system_instructions", ".definitions")
Line = dict[str, object]


def line(record: RequestRecord, now_ns: int) -> Line:
    """What a list shows. Of one in flight `duration_ms` is how long it has been so far."""
    lasted_s = record.duration_s
    if record.outcome is None or lasted_s is None:
        lasted_s = (now_ns - record.received_ns) / 1e9 if record.outcome is None else None
    return {
        "id": text(record.id),
        "trace_id": text(record.trace_id),
        "endpoint": text(record.endpoint),
        "model": text(record.model),
        "received_ms": round(record.received_s * 1e3),
        "outcome": record.outcome,
        "route": record.route or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "attempts": record.attempts,
        "ttft_ms": ms(record.ttft_s),
        "duration_ms": ms(lasted_s),
    }


def whole(record: RequestRecord, now_ns: int) -> Line:
    """With its spans, in ms from its beginning, and the text of why."""
    shown = record.spans[:MOST_SPANS]
    return {
        **line(record, now_ns),
        "spans": [_span(span, record.received_ns) for span in shown],
        "spans_left_out": len(record.spans) - len(shown),
        "why": text(record.why, MOST_WHY),
    }


def page(records: Sequence[RequestRecord], now_ns: int) -> list[Line]:
    return [line(record, now_ns) for record in records]


def _span(span: SpanRecord, zero_ns: int) -> Line:
    parent = span.parent if span.parent is not None and span.parent < MOST_SPANS else None
    return {
        "name": text(span.name),
        "part": text(span.part),
        "start_ms": (span.start_ns - zero_ns) / 1e6,
        "end_ms": None if span.end_ns is None else (span.end_ns - zero_ns) / 1e6,
        "parent": parent,
        "attributes": attributes(span.attributes),
    }


def attributes(found: Mapping[str, object]) -> Line:
    """Bounded, and none that could hold what a client wrote."""
    allowed = [
        (name, value)
        for name, value in found.items()
        if name.startswith(SHOWN) and not name.endswith(CONTENT)
    ]
    return {text(name): _value(value) for name, value in allowed[:MOST_ATTRIBUTES]}


def _value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float) else text(str(value))


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def text(value: str, most: int = MOST_TEXT) -> str:
    return value if len(value) <= most else f"{value[: most - 1]}…"
