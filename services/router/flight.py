"""The requests of late and those in flight, bounded, for whoever looks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvrelay.shared.telemetry.spans import RequestRecord

ENDED = 1000
"""Most ended requests that are kept."""


class FlightRecorder:
    """One per router, on its event loop."""

    def __init__(self) -> None:
        self._flying: OrderedDict[str, Callable[[], RequestRecord]] = OrderedDict()
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()

    def begin(self, id: str, record: Callable[[], RequestRecord]) -> None:
        """`record` tells how it stands, whenever somebody looks."""
        self._flying[id] = record

    def end(self, id: str) -> None:
        if (record := self._flying.pop(id, None)) is None:
            return
        self._ended[id] = record()
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def recent(self, limit: int) -> list[RequestRecord]:
        """The newest first."""
        flying = [record() for record in islice(reversed(self._flying.values()), limit)]
        ended = [*islice(reversed(self._ended.values()), limit)]
        found = sorted([*flying, *ended], key=lambda r: r.received_ns, reverse=True)
        return found[:limit]

    def find(self, id: str) -> RequestRecord | None:
        if (record := self._flying.get(id)) is not None:
            return record()
        return self._ended.get(id)
