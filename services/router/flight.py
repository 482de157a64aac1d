"""The requests of late and those in flight, with what their workers told of them; bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from kvrelay.services.router.why import why
from kvrelay.shared.telemetry.spans import Heard, Piece, RequestRecord, SpanRecord, Value, placed
from kvrelay.shared.types import LegRef

ENDED: Final = 1000
"""Most ended requests that are kept."""
MOST_ATTEMPTS: Final = 64
"""Of one request, on all workers, whose spans are kept."""


@dataclass(slots=True)
class Flight:
    """One request. `tell` gives the router's part of it, while it lasts and at its end."""

    tell: Callable[[], RequestRecord]
    places: dict[tuple[LegRef, str], tuple[str, int]] = field(default_factory=dict)
    """By attempt and incarnation of a worker that has it: the worker's name, when it was sent."""
    told: list[tuple[SpanRecord, ...]] = field(default_factory=list)

    def sent(self, ref: LegRef, incarnation: str, worker: str, now_ns: int) -> None:
        if len(self.places) < MOST_ATTEMPTS:
            self.places.setdefault((ref, incarnation), (worker, now_ns))

    def heard(
        self, ref: LegRef, incarnation: str, pieces: Sequence[Piece], told_ns: int, now_ns: int
    ) -> None:
        """A worker ended an attempt; one that it was not given, or has ended before, is nothing."""
        if (place := self.places.pop((ref, incarnation), None)) is None or not pieces:
            return
        worker, sent_ns = place
        first, *rest = placed(worker, pieces, Heard(sent_ns, now_ns, told_ns))
        attributes: dict[str, Value] = {
            "kvrelay.leg": int(ref.leg.rpartition("/")[2] or 0),
            "kvrelay.attempt": ref.attempt,
        }
        self.told.append((replace(first, attributes=attributes), *rest))

    def record(self) -> RequestRecord:
        """With the workers' spans, all in the request's own, which is the first."""
        own = self.tell()
        spans = [*own.spans]
        for group in sorted(self.told, key=lambda group: group[0].start_ns):
            base = len(spans)
            spans += [
                replace(span, parent=0 if span.parent is None else base + span.parent)
                for span in group
            ]
        whole = replace(own, spans=tuple(spans))
        return replace(whole, why=why(whole))


class FlightRecorder:
    """One per router, on its event loop."""

    def __init__(self) -> None:
        self._flying: OrderedDict[str, Flight] = OrderedDict()
        self._ended: OrderedDict[str, Flight] = OrderedDict()

    def begin(self, id: str, tell: Callable[[], RequestRecord]) -> Flight:
        """`tell` says how it stands, whenever somebody looks."""
        flight = self._flying[id] = Flight(tell)
        return flight

    def end(self, id: str) -> None:
        """What its workers still have to tell is heard all the same."""
        if (flight := self._flying.pop(id, None)) is None:
            return
        last = flight.tell()  # what it was made from is let go of
        flight.tell = lambda: last
        self._ended[id] = flight
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def heard(
        self, ref: LegRef, incarnation: str, pieces: Sequence[Piece], told_ns: int, now_ns: int
    ) -> None:
        id = ref.leg.rpartition("/")[0]
        if (flight := self._flying.get(id) or self._ended.get(id)) is not None:
            flight.heard(ref, incarnation, pieces, told_ns, now_ns)

    def recent(self, limit: int) -> list[RequestRecord]:
        """The newest first, without the workers' spans."""
        flying = [flight.tell() for flight in islice(reversed(self._flying.values()), limit)]
        ended = [flight.tell() for flight in islice(reversed(self._ended.values()), limit)]
        found = sorted([*flying, *ended], key=lambda r: r.received_ns, reverse=True)
        return found[:limit]

    def find(self, id: str) -> RequestRecord | None:
        """By the request's id, or that of its answer."""
        id = id.removeprefix("chat").removeprefix("cmpl-")
        flight = self._flying.get(id) or self._ended.get(id)
        return None if flight is None else flight.record()
