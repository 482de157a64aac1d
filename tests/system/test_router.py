"""The router's end, and what must not be seen of any part."""

from __future__ import annotations

import pickle
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.stack import metrics_at, until
from tests.system.cluster import PASSWORD, Cluster
from tests.system.load import PROMPTS, ask

pytestmark = [pytest.mark.system, pytest.mark.leaks_allowed]  # parts are started again
SENTINEL = "xylophone-of-the-heron"


def test_sigterm_lets_running_streams_end_and_refuses_new_ones(cluster: Cluster) -> None:
    """H03."""
    whole = {prompt: ask(cluster.url, cluster.model, prompt, 400).text for prompt in PROMPTS}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running = {p: pool.submit(ask, cluster.url, cluster.model, p, 400) for p in PROMPTS}
        until(lambda: in_flight(cluster) == len(PROMPTS), 10, "all streams run")
        cluster.router.kill(signal.SIGTERM)
        until(lambda: not cluster.ready(), 5, "the router is not ready any more")
        refused = ask(cluster.url, cluster.model, "too late", 1)
        assert refused.error
        assert {p: (r.result().text, r.result().error) for p, r in running.items()} == {
            p: (text, "") for p, text in whole.items()
        }
    assert cluster.router.wait(10) == 0
    cluster.router.start()


def test_a_router_that_starts_refuses_nobody(cluster: Cluster) -> None:
    """L9: its first answer comes from workers that were there all the time."""
    cluster.wait_all_seen()
    cluster.router.end(signal.SIGKILL)
    cluster.router.start(wait=False)
    body = {"model": cluster.model, "prompt": "hello", "max_tokens": 1}
    with httpx.Client(timeout=10) as client:

        def status() -> int:
            try:
                return client.post(f"{cluster.url}/v1/completions", json=body).status_code
            except httpx.ConnectError:
                return 0  # nobody listens yet

        answers: list[int] = []
        until(lambda: bool(answers.append(status()) or answers[-1]), 20, "the new router is there")
        assert answers[-1] == 200
    cluster.wait_all_seen()


def test_a_pickle_is_nothing_to_any_port(cluster: Cluster, tmp_path: Path) -> None:
    """I01."""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (marker,)

    payload = pickle.dumps(Bomb())
    for part in cluster.parts:
        for _, port in listening(part.pid):
            for frame in (payload, len(payload).to_bytes(4, "big") + payload):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(frame)
    assert ask(cluster.url, cluster.model, "still there?", 4).error == ""
    assert not marker.exists()
    assert all(part.popen and part.popen.poll() is None for part in cluster.parts)


def test_ports_are_open_on_loopback_only(cluster: Cluster) -> None:
    """I03."""
    addresses = {address for part in cluster.parts for address, _ in listening(part.pid)}
    assert addresses == {"127.0.0.1"}


def test_no_prompt_and_no_password_in_logs_command_lines_or_answers(cluster: Cluster) -> None:
    """I07, at the level debug."""
    assert ask(cluster.url, cluster.model, f"{SENTINEL} said", 8).error == ""
    lines = [" ".join(psutil.Process(part.pid).cmdline()) for part in cluster.parts]
    seen = cluster.logs() + "\n".join(lines)
    assert '"level": "debug"' in seen
    assert PASSWORD not in seen
    assert SENTINEL not in seen


def in_flight(cluster: Cluster) -> float:
    return metrics_at(f"{cluster.url}/metrics")["kvrelay_requests_in_flight"]


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses (those of IPv4 in IPv6 as IPv4) and ports."""
    found = psutil.Process(pid).net_connections("inet")
    return [
        (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
        for c in found
        if c.status == psutil.CONN_LISTEN
    ]
