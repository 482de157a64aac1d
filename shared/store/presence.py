"""A worker's or router's life in Redis: registered, renewed while healthy, gone when it ends.

Runs on a plain thread with a synchronous client of its own, so that neither the event loop nor a
long computation can keep it from renewing. One round trip per renewal carries lease and load. While
the process rests the thread is in native code, which repeats the last renewal (`Rest`).

    unregistered --register--> registered --renew--> registered
    registered --lease gone, Redis' doing--> unregistered        (the same incarnation again)
    registered --lease gone, we stood still--> on_lapsed() --> unregistered  (a worker: a new one)
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.connection import Line, connect, integer_reply, mapped_errors, script
from kvrelay.shared.store.keys import INDEX_TTL_MS, LATE_MS, LEASE_MS, RENEW_MS, Keys
from kvrelay.shared.store.lease import LeaseWatch
from kvrelay.shared.store.records import LoadRecord, RouterRecord, WorkerRecord
from kvrelay.shared.store.rest import Outcome, Rest

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
    """Others gave this process up: drop what they may have given away, and return the record to go
    on with; a worker's is that of a fresh incarnation.

    Must not call `Presence.stop`.
    """
    healthy: Callable[[], bool] = lambda: True
    """Whether the process made progress or had nothing to do; while False no lease is renewed."""
    load: Callable[[], LoadRecord] | None = None
    on_change: Callable[[], object] = lambda: None
    """Somebody came or went, or may have, or is late with its renewal."""
    on_registered: Callable[[], object] = lambda: None
    """Redis holds this member anew, and nothing else that lived by its lease."""
    turns: Callable[[], ctypes.c_int64] | None = None
    """A number that changes before `healthy` and `load` cease to say what they last said, provided
    that `load` then gave the same object as before. None: they are asked at each renewal."""


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
        self._line = Line(self._client)
        self._report: LoadRecord | None = None
        self._renewal = b""
        self._version = 0
        self._leave = self._client.register_script(script("leave"))
        self._watch = LeaseWatch(LEASE_MS * 1_000_000)
        self._registered = threading.Event()
        self._stopped, self._stopping = os.pipe()
        self._rest = resting(self._stopped) if subject.turns is not None else None
        self._usual = b""
        """Redis' answer to `_renewal`, the last time."""
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
        if self._stopping < 0:
            return
        os.close(self._stopping)  # which makes the other end readable
        self._stopping = -1
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stopped)
        self._line.close()
        self._client.close()

    def _run(self) -> None:
        wait_s = 0.0
        stopped = select.poll()
        stopped.register(self._stopped)
        while not stopped.poll(math.ceil(wait_s * 1000)):
            wait_s = self._step()
        if self._registered.is_set():
            self._deregister()

    def _step(self) -> float:
        """One attempt; returns the seconds to wait before the next."""
        turn = self._subject.turns().value if self._subject.turns else 0
        if not self._healthy():
            return self._to_next_s()
        started_ns = self._clock.now_ns()
        self._watch.attempt(started_ns)
        try:
            with mapped_errors(self._url):
                version = self._renew_lease() if self._registered.is_set() else self._register()
        except StoreError as error:
            return self._failed(error)
        if self._failures:
            self._recovered()
        if version != self._version:
            self._version = version
            self._subject.on_change()
            if version == 0:
                return self._lease_gone()
        if not self._registered.is_set():
            self._registered.set()
            self._subject.on_registered()
        self._watch.renewed(started_ns)
        return self._to_next_s() if self._stirring() else self._rest_from(turn)

    def _stirring(self) -> bool:
        """Whether the next renewal may be another than the last one."""
        if self._rest is None or not self._usual:
            return True
        return self._subject.load is not None and self._subject.load() is not self._report

    def _rest_from(self, turn: int) -> float:
        """`turn` was read before anything was asked: what stirred since then ends the rest."""
        fd = self._line.descriptor
        assert self._rest and self._subject.turns
        if fd is None:
            return self._to_next_s()
        outcome, renewed_ns = self._rest.until_stirred(
            fd, self._renewal, self._usual, self._subject.turns(), turn
        )
        if renewed_ns:
            self._watch.renewed(renewed_ns)
        if outcome is Outcome.BROKEN:
            self._line.close()
        return 0.0

    def _to_next_s(self) -> float:
        """All processes of one machine renew at the same moment, so that it wakes up once."""
        every_ns = RENEW_MS * 1_000_000
        return (every_ns - self._clock.now_ns() % every_ns) / 1e9

    def _healthy(self) -> bool:
        healthy = self._subject.healthy()
        if healthy == self._unhealthy:
            self._unhealthy = not healthy
            if healthy:
                _log.info("the engine makes progress again: renewing the lease")
            else:
                _log.error("the engine makes no progress: the lease is not renewed")
        return healthy

    def _register(self) -> int:
        """By the library's own way, which also brings the script to a server that lacks it."""
        self._version = 0
        self._report = self._subject.load() if self._subject.load else None
        self._renewal = self._usual = b""
        return cast(int, self._renew(keys=self._member_keys(), args=self._arguments("register")))

    def _renew_lease(self) -> int:
        """The bytes of an unchanged renewal are made once: this is what an idle worker costs."""
        report = self._subject.load() if self._subject.load else None
        if not self._renewal or (report is not self._report and report != self._report):
            self._report = report
            keys = self._member_keys()
            call = ("EVALSHA", self._renew.sha, len(keys), *keys, *self._arguments("renew"))
            self._renewal = self._line.pack(*call)
        self._usual = b""
        answer = self._line.ask(self._renewal)
        self._usual = answer
        if answer.startswith(b"-NOSCRIPT"):
            return 0  # a server that has lost its scripts has lost the lease too
        return integer_reply(answer)

    def _arguments(self, mode: str) -> list[str | int]:
        report = self._report.to_json() if self._report else ""
        times = [LEASE_MS, INDEX_TTL_MS, LATE_MS]
        return [self._member.incarnation, mode, self._record, report, *times]

    def _member_keys(self) -> list[str]:
        incarnation, keys = self._member.incarnation, self._keys
        if isinstance(self._member, WorkerRecord):
            own = [keys.worker(incarnation), keys.workers]
        else:
            own = [keys.router(incarnation), keys.routers]
        return [*own, keys.load(incarnation), keys.version, keys.workers, *self._block_keys()]

    def _block_keys(self) -> list[str]:
        if not isinstance(self._member, WorkerRecord):
            return []
        incarnation = self._member.incarnation
        return [self._keys.blocks(incarnation), self._keys.events(incarnation)]

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
            _log.warning("%s; trying again until it answers", error)
        wait_s: float = min(RETRY_FIRST_S * 2.0**self._failures, RETRY_MOST_S)
        self._failures = min(self._failures + 1, 10)
        return wait_s

    def _recovered(self) -> None:
        _log.info("Redis answers again")
        self._failures = 0

    def _deregister(self) -> None:
        if self._failures:
            return  # Redis is away: the lease ends by itself
        incarnation = self._member.incarnation
        own = [*self._member_keys()[:3], self._keys.assigned(incarnation), self._keys.version]
        keys = [*own, *self._block_keys()]
        try:
            with mapped_errors(self._url):
                self._leave(keys=keys, args=[incarnation, INDEX_TTL_MS])
        except StoreError as error:
            _log.warning("could not deregister, the lease ends by itself: %s", error)


def resting(stop: int) -> Rest | None:
    """None where the native code was not built."""
    try:
        return Rest(RENEW_MS * 1_000_000, SOCKET_TIMEOUT_S, stop)
    except OSError:
        return None
