"""Legs that are over for the router and not yet for the workers: until the last has let go.

A worker says that a leg ended when nothing there touches its blocks any more, those in quarantine
included. From the leg's end at the router until the last of its workers said so is what a client
that left, or an answer that is complete, still costs the cluster (L6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.rpc.convert import ref_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.labels import LegEnd
from kvrelay.shared.types import LegRef

MOST: Final = 4096
"""Beyond it the oldest are forgotten: workers that never answer are lost sooner than that."""

Report = Callable[[LegEnd, float], None]


@dataclass(slots=True)
class _Leaving:
    since_ns: int
    how: LegEnd = LegEnd.REPLACED
    workers: set[str] = field(default_factory=set)


class Leaving:
    """Fed by the dispatcher; `report` takes how a leg ended and the seconds until it was freed."""

    def __init__(self, report: Report, now_ns: Callable[[], int]) -> None:
        self._report = report
        self._now_ns = now_ns
        self._legs: dict[LegRef, _Leaving] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def sent(self, worker: str, command: pb.Command) -> None:
        """A command is on its way; a cancel will be answered when the attempt has ended there."""
        if command.WhichOneof("kind") != "cancel":
            return
        ref = ref_from_wire(command.cancel)
        if ref not in self._legs and len(self._legs) >= MOST:
            del self._legs[next(iter(self._legs))]
        self._legs.setdefault(ref, _Leaving(self._now_ns())).workers.add(worker)

    def over(self, ref: LegRef, how: LegEnd) -> None:
        """The leg's one end. An attempt that is cancelled before was replaced by another."""
        if (leaving := self._legs.get(ref)) is not None:
            leaving.how = how

    def ended(self, worker: str, ref: LegRef) -> None:
        """A worker has let go of an attempt."""
        leaving = self._legs.get(ref)
        if leaving is None or worker not in leaving.workers:
            return
        leaving.workers.discard(worker)
        if not leaving.workers:
            del self._legs[ref]
            self._report(leaving.how, (self._now_ns() - leaving.since_ns) / 1e9)

    def lost(self, worker: str) -> None:
        """It will not say anything any more; who waits for it alone is not counted."""
        for ref, leaving in [*self._legs.items()]:
            leaving.workers.discard(worker)
            if not leaving.workers:
                del self._legs[ref]
