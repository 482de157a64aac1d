"""Workers are told to go while they run answers: nobody notices, and the workers end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.integration.clients import Answer, ask, events, joined, token_ids
from tests.stack import Stack, metrics, metrics_at, running, until
from tests.tinymodel import write_tiny_model

from kvrelay.shared.types import Role

TEXT = "/v1/completions"
STREAMS = 20
BUDGET_S = 2.0
SHAPE: dict[str, Any] = {
    "kernels": "reference",
    "drain_s": BUDGET_S,
    "kv_cache_memory_bytes": 32 << 20,
    "threads": 1,
    "max_num_seqs": 64,
}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("trio")
    with running(folder, tiny_model, decode=2, **SHAPE) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(trio: Stack) -> list[Answer]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return [*pool.map(lambda request: ask(trio, TEXT, request), REQUESTS)]


@pytest.fixture
def stack(trio: Stack) -> Iterator[Stack]:
    """Afterwards nothing is held, and those that went are back."""
    yield trio
    for worker in trio.workers:
        if worker.popen is not None and worker.popen.poll() is not None:
            worker.start()
    until(trio.baseline, 2.0, "nothing is held")
    until(trio.all_seen, 10.0, "the router sees all workers")


def requests_of(seed: str, count: int, tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    base = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1.1, "top_p": 0.9, "seed": 5},
        {"seed": 2, "n": 2},
    )
    return [
        {**base, "prompt": token_ids(rng, 40 + at), **kinds[at % len(kinds)]} for at in range(count)
    ]


REQUESTS = requests_of("drain", 2 * STREAMS, 500)


def timed(stack: Stack, body: dict[str, Any]) -> tuple[Answer, float]:
    """The answer and its longest time between two events, in seconds."""
    body = {"model": stack.model, **body, "stream_options": {"include_usage": True}}
    times: list[float] = []
    got: list[dict[str, Any]] = []
    with stack.http.stream("POST", f"{stack.url}{TEXT}", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        for event in events(stream.iter_lines()):
            times.append(time.monotonic())
            got.append(event)
    return joined(got), max(b - a for a, b in pairwise(times))


def drain(stack: Stack, worker: str, within_s: float) -> subprocess.CompletedProcess[str]:
    """By the command that people use."""
    command = [sys.executable, "-m", "kvrelay.services.cli", "drain", worker]
    settings = ["--redis", stack.redis_url, "--within-s", f"{within_s:g}"]
    return subprocess.run([*command, *settings], capture_output=True, text=True, timeout=60)


def attempts(stack: Stack, cause: str) -> float:
    page = metrics_at(f"{stack.url}/metrics")
    return page.get(f'kvrelay_attempts_total{{cause="{cause}"}}', 0.0)


@contextmanager
def streams(stack: Stack, count: int) -> Iterator[list[Future[tuple[Answer, float]]]]:
    """All of them in mid-answer."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(timed, stack, request) for request in REQUESTS[:count]]
        until(lambda: all_run(stack, count), 20.0, "all streams run")
        yield futures


def all_run(stack: Stack, count: int) -> bool:
    return stack.counted(stack.decodes, "kvrelay_requests_running") >= count


@pytest.mark.leaks_allowed
@pytest.mark.parametrize("way", ["command", "signal"])
def test_a_decode_worker_drains_under_twenty_streams(
    stack: Stack, undisturbed: list[Answer], way: str
) -> None:
    old, before = stack.decodes[0], attempts(stack, "drain")
    with streams(stack, 2 * STREAMS) as futures:
        on_it = metrics(old)["kvrelay_requests_running"]
        begun = time.monotonic()
        if way == "command":
            said = drain(stack, old.name, BUDGET_S)
            assert said.returncode == 0, said.stdout + said.stderr
            assert f"{old.name} is gone" in said.stdout
        else:
            old.kill(signal.SIGTERM)
        assert old.wait() == 0
        took_s = time.monotonic() - begun
        together = [future.result() for future in futures]
    assert [answer for answer, _ in together] == undisturbed
    assert on_it >= STREAMS / 2
    moved = attempts(stack, "drain") - before
    assert moved > 0, "some did not end by themselves"
    assert attempts(stack, "decode_lost") == 0, "nothing was lost"
    stall_s = max(stall for _, stall in together)
    print(
        f"{way}: gone after {took_s:.2f} s, {moved:.0f} streams were moved, the longest "
        f"stall of one {1e3 * stall_s:.0f} ms"
    )


@pytest.mark.leaks_allowed
def test_what_does_not_fit_the_time_is_cut_off_and_said(
    stack: Stack, undisturbed: list[Answer]
) -> None:
    """Of the last decode worker: its answers wait for one to come."""
    last, idle = stack.decodes
    said = drain(stack, idle.name, 600.0)
    assert said.returncode == 0, said.stdout + said.stderr
    assert idle.wait(1.0) == 0, "without work it is gone at once"
    stack.workers.remove(idle)
    with streams(stack, STREAMS) as futures:
        said = drain(stack, last.name, 0.1)
        assert (said.returncode, "requests were still with it" in said.stdout) == (1, True), said
        assert last.wait() == 0
        last.start()
        assert [future.result()[0] for future in futures] == undisturbed[:STREAMS]
    stack.workers.append(idle)
    idle.start()


@pytest.mark.leaks_allowed
def test_nobody_of_that_name(stack: Stack) -> None:
    said = drain(stack, "decode-7", 1.0)
    assert said.returncode == 1
    (line,) = said.stderr.splitlines()
    assert line.startswith("error: worker: there is no 'decode-7'; alive are: decode-1 (")


@pytest.mark.leaks_allowed
def test_new_weights_are_rolled_in_beside_the_old(
    stack: Stack, undisturbed: list[Answer], tmp_path: Path
) -> None:
    """Answers that the old weights began they also end; new requests go to the new ones."""
    other = write_tiny_model(tmp_path / "other", seed=1, head_dim=64, max_position_embeddings=2048)
    old = [*stack.workers]
    with streams(stack, STREAMS) as futures:
        # More of them than of the old: the larger group is the one that new requests go to.
        roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
        new = [stack.make_worker(role, 3 + at, model=str(other)) for at, role in enumerate(roles)]
        for worker in new:
            worker.start(wait=False)
        for worker in new:
            worker.wait_ready()
        stack.workers += new
        until(stack.all_seen, 10.0, "the router sees the new group")
        for worker in old:
            said = drain(stack, worker.name, 30.0)
            assert said.returncode == 0, said.stdout + said.stderr
            assert worker.wait(1.0) == 0
            stack.workers.remove(worker)
        assert [future.result()[0] for future in futures] == undisturbed[:STREAMS]
    anew = ask(stack, TEXT, REQUESTS[0])
    assert anew.texts != undisturbed[0].texts
