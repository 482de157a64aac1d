"""`kvrelay up` with the real model: it answers, is small and quiet, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tests.stack import until
from tests.system.load import ask
from tests.system.up import Up, cpu_s

from kvrelay.shared.checkpoint.fetch import DEFAULT_MODEL, fetch_default_model

pytestmark = [pytest.mark.system, pytest.mark.leaks_allowed]  # a killed supervisor leaves orphans
PARTS = ["valkey", "prefill-0", "decode-0", "router"]
QUESTION = "What is the capital of France?"
QUIET_S, IDLE_S = 2.0, 5.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """The default model, in a cache folder that holds nothing else."""
    folder = tmp_path_factory.mktemp("up")
    models = folder / "cache" / "models"
    models.mkdir(parents=True)
    model = fetch_default_model(lambda what, done, total: None)
    (models / DEFAULT_MODEL.file).symlink_to(model)
    up = Up(folder)
    try:
        up.wait_ready()
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGKILL)


def test_the_openai_client_gets_paris_streamed_and_not(up: Up) -> None:
    print(re.findall(r"ready after [\d.]+ s", up.said))
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "messages": messages,
            "max_tokens": 16,
        }
        whole = client.chat.completions.create(**asked, temperature=0)
        pieces = client.chat.completions.create(**asked, temperature=0, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert "Paris" in streamed
    assert whole.choices[0].message.content == streamed


def test_the_printed_curl_works(up: Up) -> None:
    [command] = [line for line in up.said.splitlines() if line.strip().startswith("curl ")]
    done = subprocess.run(f"{command.strip()} -sS", shell=True, capture_output=True, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_idle_parts_sleep(up: Up) -> None:
    """How often all threads wake up is a count of ours; what a wake-up costs is the machine's."""
    time.sleep(QUIET_S)
    family = up.remember()
    before, before_s, begun_s = wakeups(family), cpu_s(family), time.monotonic()
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - begun_s
    rate, share = (wakeups(family) - before) / elapsed_s, (cpu_s(family) - before_s) / elapsed_s
    print(f"idle: {rate:.0f} wake-ups a second, {share:.2%} of a core")
    assert rate < 100
    assert share < 0.2, "something spins"


def wakeups(family: Iterable[psutil.Process]) -> int:
    """Voluntary context switches of all threads so far."""
    return sum(
        int(line.split()[1])
        for process in family
        for status in Path(f"/proc/{process.pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def test_the_router_is_small_and_holds_no_torch(up: Up) -> None:
    router = psutil.Process(up.pids()["router"])
    rss_mb = router.memory_info().rss / 1e6
    print(f"router: {rss_mb:.0f} MB")
    assert rss_mb < 200
    assert not [m.path for m in router.memory_maps() if "torch" in m.path]


def test_workers_hold_their_weights_once(up: Up) -> None:
    """134.5 M numbers in bfloat16, as computed with, beside the pool of 512 MiB."""
    limit_bytes = 269_030_016 + (512 << 20) + 400_000_000
    for name in ("prefill-0", "decode-0"):
        status = Path(f"/proc/{up.pids()[name]}/status").read_text()
        [peak_kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
        print(f"{name}: peak {int(peak_kib) / 1024:.0f} MiB")
        assert int(peak_kib) * 1024 < limit_bytes


def test_after_ctrl_c_nothing_is_left(up: Up) -> None:
    assert up.end(signal.SIGINT) == 0
    assert up.left() == []


def test_whoever_is_killed_comes_back_and_serves_and_all_stop(tiny: Path, tmp_path: Path) -> None:
    up = Up(tmp_path, "--model", str(tiny))
    up.wait_ready()
    assert list(up.pids()) == PARTS
    answer = ask(up.url, "tiny", QUESTION, 20)
    assert answer.error == ""
    for name in PARTS:
        os.kill(up.pids()[name], signal.SIGKILL)
    up.wait_said(" is back (pid ", len(PARTS))
    until(lambda: ask(up.url, "tiny", QUESTION, 20).text == answer.text, 20, "it serves again")
    assert up.end(signal.SIGTERM) == 0
    assert up.left() == []


@pytest.mark.parametrize("names", [("valkey", "decode-0"), ("router", "prefill-0")], ids=" ".join)
def test_ctrl_c_right_after_parts_were_killed(
    names: tuple[str, str], tiny: Path, tmp_path: Path
) -> None:
    up = Up(tmp_path, "--model", str(tiny))
    up.wait_ready()
    for name in names:
        os.kill(up.pids()[name], signal.SIGKILL)
    up.wait_said(" died (killed by SIGKILL)", len(names))
    assert up.end(signal.SIGINT) == 0
    assert up.left() == []


def test_a_killed_supervisor_takes_everything_with_it(tiny: Path, tmp_path: Path) -> None:
    up = Up(tmp_path, "--model", str(tiny))
    up.wait_ready()
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    assert up.left() == []


@pytest.mark.parametrize("words", ["starting valkey", "kvrelay serves"])
def test_a_closed_terminal_ends_it(words: str, tiny: Path, tmp_path: Path) -> None:
    up = Up(tmp_path, "--model", str(tiny), terminal=True)
    up.wait_said(words)
    up.close_terminal()
    assert up.wait() == 0
    assert up.left() == []


def test_ctrl_c_during_the_start(tiny: Path, tmp_path: Path) -> None:
    up = Up(tmp_path, "--model", str(tiny))
    up.wait_said("starting valkey")
    until(lambda: len(up.remember()) == 1 + len(PARTS), 20, "all parts are started")
    assert up.end(signal.SIGINT) == 0
    assert up.left() == []
