"""Writes a record on a thread of its own: an engine's turn only puts what happened into a queue.

Lines are made and written while the next step runs. Whatever is in the way of recording ends the
record, is logged once, and never harms the engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from kvrelay.shared.engine.record.entry import Entry, MakePlan
from kvrelay.shared.engine.record.lines import Header, end_line, entry_line, header_line
from kvrelay.shared.errors import ConfigError

log = logging.getLogger(__name__)

MAX_PENDING = 4096
"""Turns that wait for the disk at most."""


class RecordWriter:
    """One record, from the engine's first call on: one that begins later cannot be replayed."""

    def __init__(self, path: Path, header: Header, limit_bytes: int) -> None:
        """Raises `ConfigError` when the file cannot be made; an old one is never overwritten."""
        self.path = path
        self._left_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._file = create(path)
        self._queue: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._turn: list[Entry] = []
        self._over = False
        try:
            self._put(header_line(header))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """From one thread only. A turn ends with its plan: to wake the writer once is enough."""
        if self._over:
            return
        self._turn.append(entry)
        if isinstance(entry.asked, MakePlan) or entry.raised:
            self._hand_over()

    def close(self) -> None:
        """Write what was noted. Idempotent."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join()

    def _hand_over(self) -> None:
        if self._queue.qsize() >= MAX_PENDING:
            self._stop(f"the disk is behind by {MAX_PENDING} turns")
        turn, self._turn = self._turn, []
        self._queue.put(turn)

    def _stop(self, why: str) -> None:
        self._over = True
        log.warning("recording to %s stopped: %s", self.path, why)

    def _run(self) -> None:
        try:
            with self._file:
                self._write_until_over()
        except OSError as error:
            self._stop(error.strerror or str(error))
        finally:
            self._over = True

    def _write_until_over(self) -> None:
        while (turn := self._queue.get()) is not None:
            if self._over:
                self._put(end_line("the disk was behind"))
                return
            for line in map(entry_line, turn):
                if len(line) > self._left_bytes:
                    self._put(end_line(f"limit of {self._limit_bytes} bytes"))
                    self._stop(f"record_limit of {self._limit_bytes} bytes is reached")
                    return
                self._put(line)
            self._file.flush()  # a process that dies now takes nothing with it
        self._put(end_line("closed"))

    def _put(self, line: bytes) -> None:
        self._left_bytes -= len(line)
        self._file.write(line)


def create(path: Path) -> BinaryIO:
    """A new file that only its owner can read, for it holds what people wrote."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError as error:
        raise ConfigError(f"record: cannot write {path}: {error.strerror}") from error


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if no record can be made there; the folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"record is {str(folder)!r}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record is {str(folder)!r}: nothing can be written there")


def record_path(folder: Path, worker: str, incarnation: str) -> Path:
    """One file for each life of an engine; they sort by the time of their beginning."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return folder / f"{when}-{worker}-{incarnation[:8]}.jsonl"
