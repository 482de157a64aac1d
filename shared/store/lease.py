"""Whose fault a lost lease is: this process stood still, or Redis forgot it.

A process that was frozen (or whose engine made no step) for longer than its lease was given up by
everybody else, so it must drop its work. A process that kept trying while Redis was away, or
that Redis forgot because it was flushed or restarted, goes on and only registers again.
"""

from __future__ import annotations


class LeaseWatch:
    """Remembers whether more than one lease went by without an attempt to renew. Pure."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._covered_ns: int | None = None  # up to here the lease was renewed, or Redis was away
        self._stood_still = False

    def attempt(self, now_ns: int) -> None:
        """A renewal is about to be tried."""
        if self._covered_ns is not None and now_ns - self._covered_ns > self._lease_ns:
            self._stood_still = True

    def renewed(self, started_ns: int) -> None:
        """Redis renewed or registered the lease; its attempt began at `started_ns`."""
        self._covered_ns = started_ns
        self._stood_still = False

    def failed(self, now_ns: int) -> None:
        """Redis did not answer: that time does not count against this process."""
        self._covered_ns = now_ns

    @property
    def stood_still(self) -> bool:
        """Meaningful once Redis has said that the lease is gone."""
        return self._stood_still
