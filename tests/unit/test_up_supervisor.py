"""One supervised process: when it counts as started, what is said when not, how it is ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrelay.services.supervisor import Part, PartFailed, PartSpec, backoff_s, ending
from kvrelay.shared.clock import SystemClock
from kvrelay.shared.errors import ConfigError, KvrelayError

ANNOUNCE = "from kvrelay.shared.lifeline import announce_ready; announce_ready({'address': 'here'})"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WAIT = "import signal; signal.pause()"


def part(code: str, folder: Path, *, ready_s: float = 20.0, grace_s: float = 20.0) -> Part:
    spec = PartSpec(
        name="worker",
        role="prefill",
        command=(sys.executable, "-c", code),
        env={},
        log=folder / "worker.log",
        ready_s=ready_s,
        grace_s=grace_s,
    )
    return Part(spec, SystemClock())


async def failure(code: str, folder: Path, ready_s: float = 20.0) -> KvrelayError:
    failing = part(code, folder, ready_s=ready_s)
    try:
        with pytest.raises(KvrelayError) as error:
            await failing.start()
    finally:
        failing.kill()
        await failing.stop()
    return error.value


async def test_it_has_started_when_it_says_so_and_its_words_are_kept(tmp_path: Path) -> None:
    started = part(f"{ANNOUNCE}; print('served', flush=True); {WAIT}", tmp_path)
    await started.start()
    assert started.detail == {"address": "here"}
    assert started.pid > 0
    await started.stop()
    assert started.pid == 0


async def test_its_own_error_is_repeated(tmp_path: Path) -> None:
    code = "import sys; print('loading', flush=True); sys.exit('error: port is 1: in use')"
    error = await failure(code, tmp_path)
    assert (type(error), str(error)) == (PartFailed, "worker: port is 1: in use")


async def test_its_configuration_error_stays_one(tmp_path: Path) -> None:
    code = "import sys; print('error: dtype is int4'); sys.exit(2)"
    error = await failure(code, tmp_path)
    assert (type(error), str(error)) == (ConfigError, "worker: dtype is int4")


async def test_a_crash_is_told_with_the_last_lines(tmp_path: Path) -> None:
    error = await failure("print('one'); print('two'); import os; os.abort()", tmp_path)
    assert str(error) == "worker ended before it served (killed by SIGABRT)"
    (tmp_path / "worker.log").write_text("of the run before\n")
    error = await failure("print('one', flush=True); print('two', flush=True); exit(3)", tmp_path)
    assert str(error) == "worker ended before it served (exit code 3)\n    one\n    two"


async def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    error = await failure(WAIT, tmp_path, ready_s=0.3)
    assert str(error) == "worker did not serve within 0.3 s"


async def test_one_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    deaf = part(f"{IGNORE}; {ANNOUNCE}; {WAIT}; {WAIT}", tmp_path, grace_s=0.1)
    await deaf.start()
    await deaf.stop()
    assert deaf.pid == 0


def test_restarts_slow_down_to_a_bound() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 10_000)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_an_ending_is_told_in_words() -> None:
    assert (ending(0), ending(2), ending(-9)) == ("exit code 0", "exit code 2", "killed by SIGKILL")
