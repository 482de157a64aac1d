"""A worker's part of each request's trace: stamps while it runs, spans when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.shared.clock import Clock
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.telemetry.tracing import RequestTrace, Tracing
from kvrelay.shared.types import EndReason, LegRef


@dataclass(frozen=True, slots=True)
class Entry:
    role: str
    """`prefill`, `decode` or `both`: what this worker does with the attempt."""
    timeline: Timeline
    trace: RequestTrace


class LegJournal:
    """Costs nothing unless traces are exported."""

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock
        self._entries: dict[LegRef, Entry] = {}

    def begin(self, ref: LegRef, role: str, traceparent: str) -> None:
        if not self._tracing.enabled or ref in self._entries:
            return
        trace = self._tracing.begin(
            {"traceparent": traceparent} if traceparent else {}, self._clock.now_ns()
        )
        self._entries[ref] = Entry(role, Timeline(), trace)
        self.stamp(ref, Moment.RECEIVED)
        if role != "decode":
            self.stamp(ref, Moment.PREFILL_QUEUED)

    def stamp(self, ref: LegRef, moment: Moment) -> None:
        """The first stamp of a moment stays; an attempt that is not traced has none."""
        entry = self._entries.get(ref)
        if entry is not None:
            entry.timeline.stamp(moment, self._clock.now_ns())

    def token(self, ref: LegRef) -> None:
        """A token was sampled here (or arrived with the handoff)."""
        entry = self._entries.get(ref)
        if entry is None:
            return
        if entry.role != "decode":
            self.stamp(ref, Moment.PREFILL_ENDED)
        if entry.role != "prefill":
            self.stamp(ref, Moment.DECODE_STARTED)

    def end(self, ref: LegRef, reason: EndReason, message: str) -> None:
        """Export the spans of an attempt."""
        entry = self._entries.pop(ref, None)
        if entry is None:
            return
        if entry.role == "prefill" and reason is EndReason.FINISHED:
            entry.timeline.stamp(Moment.PUBLISHED, self._clock.now_ns())
        entry.timeline.stamp(Moment.FINISHED, self._clock.now_ns())
        attributes: dict[str, str | int] = {
            "kvrelay.leg": ref.leg,
            "kvrelay.attempt": ref.attempt,
            "kvrelay.end": reason.value,
        }
        if reason is EndReason.FAILED:
            attributes["error.type"] = message or "failed"
        self._tracing.spans_from(entry.timeline, entry.trace, entry.role, attributes)
