"""What a worker does for each attempt, and when: told to its router, observed, exported as spans.

One timeline is the source of all three. A router is told in any case, for it shows where the time
of a request went; it costs a few stamps an attempt and one entry a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.clock import Clock
from kvrelay.shared.telemetry.metrics import WorkerMetrics
from kvrelay.shared.telemetry.spans import Piece
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.telemetry.tracing import RequestTrace, Tracing
from kvrelay.shared.types import EndReason, LegRef

MOST_CHUNKS: Final = 64
"""Pieces of one kind that are told apart; the last of them has all that follows."""
QUEUE, ASK, PREFILL, EXPOSED = "prefill queue", "ask for room", "prefill", "relay exposed"
WHOLE: Final = {"prefill": "prefill worker", "decode": "decode worker", "both": "worker"}
"""What all of it is called, by role."""
RESERVE, RECEIVE, DECODE = "reserve", "receive", "decode"
COMPUTE, RELAY = "compute chunk", "relay chunk"
PIECES: Final[Mapping[str, tuple[tuple[str, Moment, Moment], ...]]] = {
    "prefill": (
        (QUEUE, Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
        (ASK, Moment.ASKED, Moment.ROOM),
        (PREFILL, Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
        (EXPOSED, Moment.PREFILL_ENDED, Moment.PUBLISHED),
    ),
    "decode": (
        (RESERVE, Moment.RECEIVED, Moment.ROOM),
        (RECEIVE, Moment.ROOM, Moment.PUBLISHED),
        (DECODE, Moment.PUBLISHED, Moment.FINISHED),
    ),
    "both": (
        (QUEUE, Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
        (PREFILL, Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
        (DECODE, Moment.DECODE_STARTED, Moment.FINISHED),
    ),
}
"""What a router is told of each role: (name, from, to)."""


@dataclass(slots=True)
class Chunks:
    """Of one kind: when each began and ended, and its tokens."""

    name: str
    found: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, start_ns: int, end_ns: int, tokens: int) -> None:
        if len(self.found) == MOST_CHUNKS:
            first_ns, _, before = self.found[-1]
            self.found[-1] = (first_ns, end_ns, before + tokens)
        else:
            self.found.append((start_ns, end_ns, tokens))

    def pieces(self, parent: int) -> list[Piece]:
        return [Piece(self.name, start, end, parent, tokens) for start, end, tokens in self.found]


@dataclass(frozen=True, slots=True)
class Entry:
    role: str
    """`prefill`, `decode` or `both`: what this worker does with the attempt."""
    timeline: Timeline
    trace: RequestTrace | None
    """None when nothing is exported."""
    computed: Chunks = field(default_factory=lambda: Chunks(COMPUTE))
    relayed: Chunks = field(default_factory=lambda: Chunks(RELAY))

    def at_ns(self, moment: Moment) -> int | None:
        """When it happened. Of what is computed the engine knows: an event loop that gets no
        processor meanwhile hears of the begin and the end of a prompt together."""
        stamp_ns, chunks = self.timeline.at_ns(moment), self.computed.found
        if stamp_ns is not None and chunks:
            if moment is Moment.PREFILL_STARTED:
                return min(stamp_ns, chunks[0][0])
            if moment is Moment.PREFILL_ENDED:
                return min(stamp_ns, chunks[-1][1])
        return stamp_ns

    def took_s(self, start: Moment, end: Moment) -> float | None:
        start_ns, end_ns = self.at_ns(start), self.at_ns(end)
        if start_ns is None or end_ns is None or end_ns < start_ns:
            return None
        return (end_ns - start_ns) / 1e9

    def pieces(self) -> tuple[Piece, ...]:
        """All of it, in the worker's time; chunks in what they are part of."""
        stamps_ns = [at_ns for _, at_ns in self.timeline]
        out = [Piece(WHOLE[self.role], stamps_ns[0], stamps_ns[-1])]
        for name, start, end in PIECES[self.role]:
            start_ns, end_ns = self.at_ns(start), self.at_ns(end)
            if start_ns is not None and end_ns is not None and start_ns <= end_ns:
                out.append(Piece(name, start_ns, end_ns, 1 if name == ASK else 0))
        prefill = next((at for at, piece in enumerate(out) if piece.name == PREFILL), 0)
        return (*out, *self.computed.pieces(prefill), *self.relayed.pieces(0))


class LegJournal:
    """`computed` is called by the engine's thread, all the rest on the event loop."""

    def __init__(self, tracing: Tracing, clock: Clock, metrics: WorkerMetrics) -> None:
        self._tracing = tracing
        self._clock = clock
        self._metrics = metrics
        self._entries: dict[LegRef, Entry] = {}
        self._by_key: dict[str, Entry] = {}

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def begin(self, ref: LegRef, role: str, traceparent: str) -> None:
        if ref in self._entries:
            return
        trace = None
        if self._tracing.enabled:
            headers = {"traceparent": traceparent} if traceparent else {}
            trace = self._tracing.begin(headers, self._clock.now_ns())
        self._entries[ref] = self._by_key[ref.key] = Entry(role, Timeline(), trace)
        self.stamp(ref, Moment.RECEIVED)
        if role != "decode":
            self.stamp(ref, Moment.PREFILL_QUEUED)

    def stamp(self, ref: LegRef, moment: Moment) -> None:
        """The first stamp of a moment stays; an attempt that is not here has none."""
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

    def computed(self, key: str, tokens: int, took_ns: int) -> None:
        """A step that has just ended computed so many tokens of a prompt."""
        entry = self._by_key.get(key)
        if entry is not None:
            now_ns = self._clock.now_ns()
            entry.computed.add(now_ns - took_ns, now_ns, tokens)

    def relayed(self, ref: LegRef, tokens: int, took_ns: int) -> None:
        """A chunk has just left."""
        entry = self._entries.get(ref)
        if entry is not None:
            now_ns = self._clock.now_ns()
            entry.relayed.add(now_ns - took_ns, now_ns, tokens)

    def end(self, ref: LegRef, reason: EndReason, message: str) -> tuple[Piece, ...]:
        """Export the spans of an attempt, and tell its pieces; none when it never began here."""
        entry = self._entries.pop(ref, None)
        if entry is None:
            return ()
        self._by_key.pop(ref.key, None)
        if entry.role == "prefill" and reason is EndReason.FINISHED:
            entry.timeline.stamp(Moment.PUBLISHED, self._clock.now_ns())
        entry.timeline.stamp(Moment.FINISHED, self._clock.now_ns())
        if entry.trace is not None:
            attributes: dict[str, str | int] = {
                "kvrelay.leg": ref.leg,
                "kvrelay.attempt": ref.attempt,
                "kvrelay.end": reason.value,
            }
            if reason is EndReason.FAILED:
                attributes["error.type"] = message or "failed"
            self._tracing.spans_from(entry.timeline, entry.trace, entry.role, attributes)
        self._observe(entry)
        return entry.pieces()

    def _observe(self, entry: Entry) -> None:
        """A prompt's times, of what came to its end here."""
        for observed, start, end in (
            (self._metrics.queued, Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
            (self._metrics.prompt_computed, Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
            (self._metrics.transfer_exposed, Moment.PREFILL_ENDED, Moment.PUBLISHED),
        ):
            if (seconds := entry.took_s(start, end)) is not None:
                observed(seconds)
