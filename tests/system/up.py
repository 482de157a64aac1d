"""`kvrelay up` as a person runs it, and what is left of it afterwards."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from tests.stack import START_S, until

from kvrelay.services.valkey import free_port

PART = re.compile(r"^\w+ +(\S+) +[\d.:]+ +pid (\d+)", re.MULTILINE)
SYSV = Path("/proc/sysvipc/shm")


class Up:
    """One run. Its output is read by a thread, so that nobody waits for a full pipe."""

    def __init__(self, folder: Path, *arguments: str, terminal: bool = False) -> None:
        """With `terminal` it runs on a terminal of its own, as in a window."""
        self.port = free_port()
        self.temp = folder / "tmp"
        self.temp.mkdir(parents=True)
        self._shared_files = set(os.listdir("/dev/shm"))
        self._family: dict[int, psutil.Process] = {}
        own = {"KVRELAY_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(self.temp)}
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVRELAY_")}
        program = [sys.executable, "-m", "kvrelay.services.cli", "up", "--port", str(self.port)]
        self._output, its_end = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [*(("setsid", "--ctty", "--wait") if terminal else ()), *program, *arguments],
            env={**kept, **own, "COLUMNS": "200"},
            stdin=its_end if terminal else subprocess.DEVNULL,
            stdout=its_end,
            stderr=its_end,
        )
        os.close(its_end)
        self.said, self._closing = "", False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # that is how a terminal ends
            while not self._closing:
                if select.select([self._output], [], [], 0.05)[0]:
                    if not (piece := os.read(self._output, 65536)):
                        return
                    self.said += piece.decode().replace("\r\n", "\n")

    def close_terminal(self) -> None:
        self.remember()
        self._closing = True
        self._reader.join()
        os.close(self._output)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_said(self, words: str, times: int = 1) -> None:
        def told() -> bool:
            return self.said.count(words) >= times or self.process.poll() is not None

        until(told, START_S, f"{words!r} in {self.said}")
        assert self.said.count(words) >= times, self.said
        self.remember()

    def wait_ready(self) -> None:
        self.wait_said("Logs: ")

    def remember(self) -> list[psutil.Process]:
        """Note all processes there are now, to be looked for at the end."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            family = [top, *top.children(recursive=True)]
            self._family |= {process.pid: process for process in family}
            return family
        return []

    def pids(self) -> dict[str, int]:
        """Of each part, as printed at the start."""
        return {name: int(pid) for name, pid in PART.findall(self.said)}

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.remember()
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(30)
        self._reader.join()
        return status

    def left(self) -> list[str]:
        """What should be gone and is still there after a moment. The dead that nobody has waited
        for are gone: that is for the process that inherited them."""
        with suppress(AssertionError):
            until(lambda: not self._left(), 5, "everything is gone")
        return self._left()

    def _left(self) -> list[str]:
        alive = [f"process {p}" for p in self._family.values() if runs(p)]
        files = [f"/dev/shm/{f}" for f in set(os.listdir("/dev/shm")) - self._shared_files]
        segments = [line.split() for line in SYSV.read_text().splitlines()[1:]]
        shared = [f"segment {s[1]}" for s in segments if int(s[4]) in self._family]
        temporary = [str(path) for path in self.temp.iterdir()]
        return alive + files + shared + temporary + self._open_ports()

    def _open_ports(self) -> list[str]:
        listening = [
            (c.laddr.port, c.pid)
            for c in psutil.net_connections("inet")
            if c.laddr and c.status == psutil.CONN_LISTEN
        ]
        return [
            f"port {port}" for port, pid in listening if pid in self._family or port == self.port
        ]


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU time that they have used so far."""
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)
