"""`kvrelay up` with stand-ins for the services: nothing is left behind, whoever dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvrelay.services.deployment import (
    SHARED_DUTY,
    Deployment,
    UpConfig,
    child_env,
    worker_configs,
)
from kvrelay.services.local import run_folder
from kvrelay.services.router.config import RouterConfig
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

SCRIPT = Path(__file__).with_name("up_run.py")
PARTS = ["valkey", "prefill-0", "decode-0", "router"]
LINE = re.compile(r"^(\w+) +(\S+) +127\.0\.0\.1:(\d+) +pid (\d+)")
Start = Callable[..., "Up"]


class Up:
    """A running `kvrelay up` and what it prints."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVRELAY_")}
        self.temp = folder / "tmp"
        self.temp.mkdir(exist_ok=True)
        env |= {"KVRELAY_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(self.temp)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self.pids: dict[str, int] = {}
        self.ports: dict[str, int] = {}
        self.children: list[psutil.Process] = []

    def until(self, end: str) -> str:
        """The lines up to the one with `end`, which must come."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if match := LINE.match(line):
                self.pids[match[2]], self.ports[match[2]] = int(match[4]), int(match[3])
            if end in line:
                self.children += psutil.Process(self.process.pid).children(recursive=True)
                return "".join(lines)
        raise AssertionError(f"no {end!r} in: {''.join(lines)}")

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; (exit code, what it still said)."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said

    def left(self) -> list[object]:
        """Processes, ports and temporary folders that should be gone (zombies count as left)."""
        _, alive = psutil.wait_procs(self.children, timeout=10)
        listening = []
        for name, port in self.ports.items():
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    listening.append(name)
        return [*alive, *listening]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def run(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield run
    for up in started:
        up.process.kill()
        up.process.communicate()


def test_it_prints_each_part_and_a_curl_and_leaves_nothing_after_ctrl_c(
    start: Start, tmp_path: Path
) -> None:
    up = start()
    said = up.until("Logs: ")
    assert list(up.pids) == PARTS
    url = f"http://127.0.0.1:{up.ports['router']}"
    assert f"kvrelay serves tiny at {url}/v1" in said
    assert f"curl {url}/v1/chat/completions" in said
    [logs] = (tmp_path / "cache" / "runs").iterdir()
    kept = sorted(f"{p}.log" for p in PARTS)
    assert sorted(file.name for file in logs.iterdir()) == ["cluster.json", *kept]
    assert up.end(signal.SIGINT) == (0, "stopping ...\nstopped\n")
    assert sorted(file.name for file in logs.iterdir()) == kept
    assert up.left() == []
    assert list(up.temp.iterdir()) == []


def test_a_part_that_is_killed_is_started_again_and_then_all_stop(start: Start) -> None:
    up = start()
    up.until("Logs: ")
    for name in PARTS:
        os.kill(up.pids[name], signal.SIGKILL)
        assert f"{name} died (killed by SIGKILL); starting it again in 0.5 s" in up.until("died")
        assert re.search(rf"{name} is back \(pid \d+\)", up.until("is back"))
    assert up.end(signal.SIGTERM) == (0, "stopping ...\nstopped\n")
    assert up.left() == []


def test_logs_that_somebody_removed_stop_no_part_from_coming_back(
    start: Start, tmp_path: Path
) -> None:
    up = start()
    up.until("Logs: ")
    shutil.rmtree(tmp_path / "cache" / "runs")
    os.kill(up.pids["decode-0"], signal.SIGKILL)
    assert re.search(r"decode-0 is back \(pid \d+\)", up.until("is back"))
    assert up.end(signal.SIGTERM) == (0, "stopping ...\nstopped\n")
    assert [log.name for log in tmp_path.glob("cache/runs/*/*")] == ["decode-0.log"]


def test_the_logs_of_what_still_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    running = tmp_path / "runs" / f"19700101-000000-{os.getpid()}"
    ended = [tmp_path / "runs" / f"197001{day}-000000-{1 << 30}" for day in range(10, 30)]
    for folder in (running, *ended):
        folder.mkdir(parents=True)
    newest = run_folder()
    assert sorted(newest.parent.iterdir()) == [running, *ended[-9:], newest]


def test_nothing_survives_a_killed_supervisor(start: Start) -> None:
    up = start()
    up.until("Logs: ")
    assert len(up.children) >= len(PARTS)
    code, _ = up.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert up.left() == []


def test_ctrl_c_while_starting_leaves_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prefill-0.mute").touch()
    up = start()
    up.until("starting")
    code, said = up.end(signal.SIGINT)
    assert (code, said) == (0, "stopping ...\nstopped\n")
    assert up.left() == []


def test_a_frozen_part_is_ended_too(start: Start) -> None:
    up = start()
    up.until("Logs: ")
    os.kill(up.pids["router"], signal.SIGSTOP)
    os.kill(up.pids["decode-0"], signal.SIGSTOP)
    assert up.end(signal.SIGINT) == (0, "stopping ...\nstopped\n")
    assert up.left() == []


def test_a_second_ctrl_c_does_not_wait_for_a_part_that_does_not_end(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "decode-0.deaf").touch()
    up = start("0", "600")
    up.until("Logs: ")
    up.process.send_signal(signal.SIGINT)
    up.until("stopping ...")
    while up.process.poll() is None:  # one that follows the first at once counts as its echo
        up.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            up.process.wait(timeout=0.2)
    assert up.process.returncode == 0
    assert up.left() == []


def test_the_error_of_a_part_that_cannot_start_is_the_answer(start: Start, tmp_path: Path) -> None:
    (tmp_path / "decode-0.fail").write_text("model: the file is truncated")
    up = start()
    said = up.until("error: ")
    assert said.endswith("error: decode-0: model: the file is truncated\n")
    assert up.process.wait(timeout=30) == 1
    assert up.left() == []


def test_a_port_in_use_is_named_before_anything_starts(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        up = start(str(port))
        said, _ = up.process.communicate(timeout=30)
    assert up.process.returncode == 1
    assert said == (
        f"error: port: {port} on 127.0.0.1 is taken by another program; "
        "choose another with --port\n"
    )


def deployment(up: UpConfig) -> Deployment:
    worker = WorkerConfig(model="m", port=9000, metrics_port=9001, threads=2)
    return Deployment(up, RouterConfig(model="m"), worker, external_redis=True)


def test_workers_differ_in_role_and_name_and_share_no_port() -> None:
    configs = worker_configs(deployment(UpConfig(prefill=2, decode=1)))
    assert [(c.role, c.name) for c in configs] == [
        (Role.PREFILL, "prefill-0"),
        (Role.PREFILL, "prefill-1"),
        (Role.DECODE, "decode-0"),
    ]
    assert {(c.port, c.metrics_port, c.threads) for c in configs} == {(0, 0, 2)}


def test_unsplit_is_workers_that_do_both_as_many_as_decode() -> None:
    configs = worker_configs(deployment(UpConfig(prefill=3, decode=2, unsplit=True)))
    assert [(c.role, c.name) for c in configs] == [(Role.BOTH, "both-0"), (Role.BOTH, "both-1")]


def test_decode_workers_give_way_to_prompts_where_they_share_processors() -> None:
    def duties(**worker: object) -> list[float]:
        some = deployment(UpConfig())
        pattern = WorkerConfig.model_validate({"model": "m", **worker})
        return [each.shared_duty for each in worker_configs(replace(some, worker=pattern))]

    assert duties() == [1.0, SHARED_DUTY]
    assert duties(shared_duty=0.5) == [0.5, 0.5]
    assert duties(cpu_affinity="0") == [1.0, SHARED_DUTY]


def test_a_part_sees_its_own_settings_and_no_others() -> None:
    base = {
        "PATH": "/bin",
        "KVRELAY_RPC_PORT": "1",
        "KVRELAY_CACHE_DIR": "/c",
        "KVRELAY_CONFIG": "f",
    }
    env = child_env(RouterConfig(model="m", redis_url="redis://:p@h:1"), base)
    assert (env["PATH"], env["KVRELAY_CACHE_DIR"]) == ("/bin", "/c")
    assert (env["KVRELAY_MODEL"], env["KVRELAY_REDIS_URL"]) == ("m", "redis://:p@h:1")
    assert "KVRELAY_RPC_PORT" not in env
    assert "KVRELAY_CONFIG" not in env
