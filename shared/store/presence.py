"""A worker's or router's life in Redis: registered, renewed while healthy, gone when it ends.

Runs on a plain thread with a synchronous client of its own, so that neither the event loop nor a
long computation can keep it from renewing. One round trip per renewal carries lease and load.

    unregistered --register--> registered --renew--> registered
    registered --lease gone, Redis' doing--> unregistered        (the same incarnation again)
    registered --lease gone, we stood still--> on_lapsed() --> unregistered  (a new incarnation)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.connection import connect, mapped_errors, script
from kvrelay.shared.store.keys import INDEX_TTL_MS, LEASE_MS, RENEW_MS, Keys
from kvrelay.shared.store.lease import LeaseWatch
from kvrelay.shared.store.records import LoadRecord, RouterRecord, WorkerRecord

SOCKET_TIMEOUT_S: Final = 0.5
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 1.0

Member = WorkerRecord | RouterRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """The process that a `Presence` speaks for. All calls come from the presence thread."""

    record: Member
    on_lapsed: Callable[[], Member]
    """Others gave this process up: drop all work, then return the record of a fresh incarnation.

    Must not call `Presence.stop`.
    """
    healthy: Callable[[], bool] = lambda: True
    """Whether the process made progress or had nothing to do; while False no lease is renewed."""
    load: Callable[[], LoadRecord] | None = None


class Presence:
    """Keeps one member registered from `start` to `stop`, whatever Redis does meanwhile.

    A `Subject` whose functions raise ends the thread, and with it the lease: a process that cannot
    say how it is counts as lost.
    """

    def __init__(self, url: str, keys: Keys, subject: Subject, clock: Clock) -> None:
        """Raises `ConfigError` for the URL and `StoreError` for a record no reader would take."""
        self._url = url
        self._keys = keys
        self._subject = subject
        self._clock = clock
        self._member = subject.record
        self._record = subject.record.to_json()
        self._client = connect(url, SOCKET_TIMEOUT_S)
        self._renew = self._client.register_script(script("renew"))
        self._leave = self._client.register_script(script("leave"))
        self._watch = LeaseWatch(LEASE_MS * 1_000_000)
        self._registered = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0
        self._unhealthy = False
        self._thread = threading.Thread(target=self._run, name="kvrelay-presence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_registered_blocking(self, timeout_s: float) -> bool:
        """Whether Redis holds this member now, waiting up to `timeout_s` for that."""
        return self._registered.wait(timeout_s)

    @property
    def registered(self) -> bool:
        """Whether Redis held this member when it last answered."""
        return self._registered.is_set()

    def stop(self) -> None:
        """Deregister and end the thread; a frozen Redis delays it by a few socket timeouts."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self._step())
        if self._registered.is_set():
            self._deregister()

    def _step(self) -> float:
        """One attempt; returns the seconds to wait before the next."""
        if not self._healthy():
            return RENEW_MS / 1_000
        started_ns = self._clock.now_ns()
        self._watch.attempt(started_ns)
        try:
            with mapped_errors(self._url):
                held = self._send("renew" if self._registered.is_set() else "register")
        except StoreError as error:
            return self._failed(error)
        self._recovered()
        if not held:
            return self._lease_gone()
        self._watch.renewed(started_ns)
        self._registered.set()
        return RENEW_MS / 1_000

    def _healthy(self) -> bool:
        healthy = self._subject.healthy()
        if healthy == self._unhealthy:
            self._unhealthy = not healthy
            if healthy:
                _log.info("the engine makes progress again: renewing the lease")
            else:
                _log.error("the engine makes no progress: the lease is not renewed")
        return healthy

    def _send(self, mode: str) -> bool:
        incarnation = self._member.incarnation
        load = self._subject.load
        report = load().to_json() if load else ""
        args: list[str | int] = [incarnation, mode, self._record, report, LEASE_MS, INDEX_TTL_MS]
        return bool(self._renew(keys=self._member_keys(), args=args))

    def _member_keys(self) -> list[str]:
        incarnation = self._member.incarnation
        if isinstance(self._member, WorkerRecord):
            return [
                self._keys.worker(incarnation),
                self._keys.workers,
                self._keys.load(incarnation),
            ]
        return [self._keys.router(incarnation), self._keys.routers, self._keys.load(incarnation)]

    def _lease_gone(self) -> float:
        self._registered.clear()
        if self._watch.stood_still:
            _log.warning("the lease ended while this process stood still: starting over")
            self._member = self._subject.on_lapsed()
            self._record = self._member.to_json()
            self._watch = LeaseWatch(LEASE_MS * 1_000_000)
        else:
            _log.warning("Redis lost the registration: registering again")
        return 0.0

    def _failed(self, error: StoreError) -> float:
        self._watch.failed(self._clock.now_ns())
        if self._failures == 0:
            _log.warning("%s; trying again until it does", error)
        wait_s: float = min(RETRY_FIRST_S * 2.0**self._failures, RETRY_MOST_S)
        self._failures = min(self._failures + 1, 10)
        return wait_s

    def _recovered(self) -> None:
        if self._failures:
            _log.info("Redis answers again")
            self._failures = 0

    def _deregister(self) -> None:
        if self._failures:
            return  # Redis is away: the lease ends by itself
        incarnation = self._member.incarnation
        keys = [*self._member_keys(), self._keys.assigned(incarnation)]
        try:
            with mapped_errors(self._url):
                self._leave(keys=keys, args=[incarnation])
        except StoreError as error:
            _log.warning("could not deregister, the lease ends by itself: %s", error)
