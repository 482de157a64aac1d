"""Processes that are kept running: started, waited for, started again when they die, stopped.

A `Part` is one such process. It knows nothing of what it runs: a command that writes one line of
JSON to the pipe it is handed (`kvrelay.shared.lifeline.announce_ready`), or one with a probe.
Nothing here outlives this process: the kernel ends the parts with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvrelay.shared import lifeline
from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import ConfigError, KvrelayError

Detail = Mapping[str, str | int]
Report = Callable[[str], None]
"""Told one line whenever a part dies or is back."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
STEADY_S = 30.0
"""A part that ran this long is started again without a history."""
_TAIL_LINES = 15


class PartFailed(KvrelayError):
    """A part ended, or took too long, before it could serve."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How one process is run."""

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path | None
    """Where its output goes; None leaves it on the terminal."""
    ready_s: float
    """Longest start in seconds."""
    grace_s: float
    """Time in seconds to end by itself once it was asked to."""
    probe: Callable[[], Awaitable[Detail]] | None = None
    """Returns once the part serves. None: the part announces that itself."""


def backoff_s(deaths: int) -> float:
    """Delay before the next start after so many deaths in a row: 0.5, 1, 2, ... at most 10."""
    return min(FIRST_DELAY_S * 2.0 ** (min(deaths, 16) - 1), LONGEST_DELAY_S)


def ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"


class Part:
    """One process. `start` it once, then let `keep` run until it is cancelled, then `stop` it."""

    def __init__(self, spec: PartSpec, clock: Clock) -> None:
        self.spec = spec
        self.detail: Detail = {}
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._log_start_bytes = 0

    @property
    def pid(self) -> int:
        """Of the running process; 0 when there is none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def start(self) -> None:
        """Run the command and wait until it serves. Raises `PartFailed` or its `ConfigError`."""
        read_fd, write_fd = os.pipe()
        try:
            self._process = process = await self._spawn(write_fd)
        except OSError as error:
            os.close(read_fd)
            raise PartFailed(f"{self.spec.name} could not be started: {error}") from error
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._ready(read_fd))
        try:
            async with asyncio.timeout(self.spec.ready_s):
                await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
                if ready.done() and (detail := ready.result()) is not None:
                    self.detail = detail
                    return
                raise self._failure(await ended)
        except TimeoutError:
            raise PartFailed(
                f"{self.spec.name} did not serve within {self.spec.ready_s:g} s{self._tail()}"
            ) from None
        finally:
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def ended(self) -> str:
        """How the process ended, once it has."""
        return ending(await self._process.wait()) if self._process else "never started"

    async def keep(self, report: Report) -> None:
        """Start the part again whenever it ends; runs until it is cancelled."""
        deaths = 0
        while True:
            since_ns = self._clock.now_ns()
            how = await self.ended()
            steady = self._clock.now_ns() - since_ns > STEADY_S * 1e9
            deaths = 1 if steady else deaths + 1
            delay_s = backoff_s(deaths)
            what = "has ended" if how == ending(0) else f"died ({how})"
            report(f"{self.spec.name} {what}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self.start()
                report(f"{self.spec.name} is back (pid {self.pid})")
            except KvrelayError as error:
                report(str(error))
                await self.stop()

    async def stop(self) -> None:
        """Ask the process to end, then end it. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.grace_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None and self._process.returncode is None:
            self.signal(signal.SIGKILL)

    def signal(self, signum: signal.Signals) -> None:
        """To the process that was started last."""
        # Not by the library, which would reap a child that has just ended: asyncio then misses it.
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signum)

    async def _spawn(self, ready_fd: int) -> asyncio.subprocess.Process:
        log = self._open_log()
        try:
            return await asyncio.create_subprocess_exec(
                *lifeline.wrapped(list(self.spec.command)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.spec.env, lifeline.READY_FD: str(ready_fd)},
                pass_fds=(ready_fd,),
                start_new_session=True,  # the terminal's Ctrl-C is ours to pass on, in order
            )
        finally:
            if log is not None:
                log.close()

    def _open_log(self) -> IO[bytes] | None:
        if self.spec.log is None:
            return None
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        log = self.spec.log.open("ab")
        self._log_start_bytes = log.tell()
        return log

    async def _ready(self, read_fd: int) -> Detail | None:
        """What the part announces; None when it ends without a word."""
        with os.fdopen(read_fd, "rb") as pipe:
            if self.spec.probe is not None:
                return await self.spec.probe()
            reader = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            try:
                line = await reader.readline()
            finally:
                transport.close()
        detail: Detail | None = json.loads(line) if line.endswith(b"\n") else None
        return detail

    def _failure(self, returncode: int) -> KvrelayError:
        """The part's own one-line error where it gave one, else how it ended and its last words."""
        lines = self._log_lines()
        if lines and lines[-1].startswith("error: "):
            kind = ConfigError if returncode == 2 else PartFailed
            return kind(f"{self.spec.name}: {lines[-1].removeprefix('error: ')}")
        return PartFailed(
            f"{self.spec.name} ended before it served ({ending(returncode)}){self._tail()}"
        )

    def _log_lines(self) -> list[str]:
        if self.spec.log is None:
            return []
        try:
            with self.spec.log.open("rb") as log:
                log.seek(self._log_start_bytes)
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def _tail(self) -> str:
        lines = self._log_lines()[-_TAIL_LINES:]
        return "".join(f"\n    {line}" for line in lines)
