"""One process' timeline of one leg: the single source of its spans, histograms and timing fields.

    router   received -> checked -> assigned -> first_token -> published -> finished
    prefill  received -> prefill_queued -> asked -> room -> prefill_started -> prefill_ended
             -> published -> finished
    decode   received -> room -> published -> decode_started -> finished

Every process stamps with its own monotonic clock; stamps of two processes are never subtracted.
A new attempt is a new timeline on a worker; on the router the first stamp of each moment stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum


class Moment(StrEnum):
    """What is worth a stamp, in the order in which a request usually passes it."""

    RECEIVED = "received"
    CHECKED = "checked"
    """A router has read it and knows that it can be served."""
    ASSIGNED = "assigned"
    """A router has chosen the workers and sent the request to them."""
    PREFILL_QUEUED = "prefill_queued"
    ASKED = "asked"
    """A prefill worker asked decode for room."""
    PREFILL_STARTED = "prefill_started"
    """The first chunk is planned: room on the decode worker is reserved."""
    PREFILL_ENDED = "prefill_ended"
    """Token 0 is known."""
    FIRST_TOKEN = "first_token"
    """A router hands the first token to the client."""
    ROOM = "room"
    """A decode worker has room for all of the prompt's KV."""
    PUBLISHED = "published"
    """The last block is readable on the decode worker."""
    DECODE_STARTED = "decode_started"
    FINISHED = "finished"


class Timeline:
    """Append-only: a moment is stamped once, and time never runs backwards."""

    __slots__ = ("_stamps_ns",)

    def __init__(self) -> None:
        self._stamps_ns: dict[Moment, int] = {}

    def stamp(self, moment: Moment, now_ns: int) -> bool:
        """Note that `moment` happened at monotonic `now_ns`; False if it was noted before.

        Two threads of a process may stamp: one that read its clock first and came second gets the
        time of the latest stamp, so that order and times always agree.
        """
        if moment in self._stamps_ns:
            return False
        latest_ns = next(reversed(self._stamps_ns.values()), now_ns)
        self._stamps_ns[moment] = max(now_ns, latest_ns)
        return True

    def at_ns(self, moment: Moment) -> int | None:
        return self._stamps_ns.get(moment)

    def __iter__(self) -> Iterator[tuple[Moment, int]]:
        """(moment, monotonic ns) in the order of time."""
        return iter(self._stamps_ns.items())

    def between_s(self, start: Moment, end: Moment) -> float | None:
        """None unless both were stamped, in this order."""
        start_ns, end_ns = self._stamps_ns.get(start), self._stamps_ns.get(end)
        if start_ns is None or end_ns is None or end_ns < start_ns:
            return None
        return (end_ns - start_ns) / 1e9

    @property
    def duration_s(self) -> float | None:
        return self.between_s(Moment.RECEIVED, Moment.FINISHED)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, as the router's client sees it."""
        return self.between_s(Moment.RECEIVED, Moment.FIRST_TOKEN)

    @property
    def queue_s(self) -> float | None:
        """Time in the prefill worker's queue."""
        return self.between_s(Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED)

    @property
    def prefill_s(self) -> float | None:
        return self.between_s(Moment.PREFILL_STARTED, Moment.PREFILL_ENDED)

    @property
    def transfer_exposed_s(self) -> float | None:
        """The part of the transfer that no computation hid: from token 0 until published."""
        return self.between_s(Moment.PREFILL_ENDED, Moment.PUBLISHED)

    def tpot_s(self, output_tokens: int) -> float | None:
        """Mean time per output token after the first; None when there is no second."""
        streamed_s = self.between_s(Moment.FIRST_TOKEN, Moment.FINISHED)
        if streamed_s is None or output_tokens < 2:
            return None
        return streamed_s / (output_tokens - 1)
