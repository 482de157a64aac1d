"""The tie between a supervisor and its children: they die with it, and tell it when they serve.

A supervisor that is killed outright can stop nobody, so each child is started as

    python -m kvrelay.shared.lifeline SUPERVISOR_PID COMMAND [ARG ...]

which asks the kernel to kill it when its parent ends and then becomes COMMAND (the request outlives
the exec). A child that serves writes one line of JSON to the pipe in `KVRELAY_READY_FD`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping

READY_FD = "KVRELAY_READY_FD"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; ends it now if that has happened.

    Nothing happens where the kernel cannot do it (outside Linux).
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def announce_ready(detail: Mapping[str, str | int]) -> None:
    """Tell the supervisor, if there is one, that this service can serve. Later calls do nothing.

    `address` in `detail` is where it can be reached; the rest is shown to the person as it is.
    """
    fd = os.environ.pop(READY_FD, None)
    if fd is None:
        return
    with os.fdopen(int(fd), "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(dict(detail)) + "\n")


def wrapped(command: list[str]) -> list[str]:
    """`command`, to be started by this process, so that it dies with this process."""
    return [sys.executable, "-m", "kvrelay.shared.lifeline", str(os.getpid()), *command]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
