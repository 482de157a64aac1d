"""A router freezes or dies: workers let go of its work, its records close, its clients get one end.

It is a second router on the workers of another one. Answers are slow: they must not come to their
end while the router does not look, nor fill what lies between it and a worker, for then the kernel
ends the connection.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from tests.integration.clients import ask, delta_text, token_ids
from tests.stack import Stack, metrics_at, running, until
from tests.tinymodel import write_tiny_model

pytestmark = pytest.mark.leaks_allowed  # routers are started
TEXT = "/v1/completions"
OUTPUTS = 'kvrelay_computed_tokens_total{kind="output"}'
SWEPT = "kvrelay_ledger_swept_total"
CONFLICTS = 'kvrelay_ledger_events_total{result="conflict"}'
CLIENTS = 4
ANSWER_TOKENS = 400
LET_GO_S = 3.0
SWEPT_S = 8.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("router_gone")
    model = write_tiny_model(folder / "model", layers=12)
    shape: dict[str, Any] = {"prefill": 2, "decode": 2, "env": {"UCX_TLS": "tcp"}}
    shape |= {"kv_cache_memory_bytes": 64 << 20, "threads": 1, "kernels": "reference"}
    with running(folder / "stack", model, **shape) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: Stack) -> list[str]:
    """The texts of the answers that a freeze will cut in two."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(lambda body: ask(cluster, TEXT, body), bodies("frozen"))
        return [answer.texts[0] for answer in answers]


def bodies(seed: str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    base = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0.9, "stream": True}
    return [{**base, "prompt": token_ids(rng, 60 + n), "seed": n} for n in range(CLIENTS)]


def stream(stack: Stack, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The text, and every end that the client was told, "cut off" among them."""
    text, ends = "", []
    try:
        json_body = {"model": stack.model, **body}
        with stack.http.stream("POST", f"{stack.url}{TEXT}", json=json_body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ends.append("done")
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        ends.append("error")
                        continue
                    text += "".join(delta_text(choice) for choice in event["choices"])
    except httpx.HTTPError:
        ends.append("cut off")
    return text, ends


def begun(pool: ThreadPoolExecutor, stack: Stack, seed: str) -> list[Future[tuple[str, list[str]]]]:
    """All are in mid-answer."""
    enough = stack.counted(stack.decodes, OUTPUTS) + 10 * CLIENTS
    answers = [pool.submit(stream, stack, body) for body in bodies(seed)]
    until(lambda: stack.counted(stack.decodes, OUTPUTS) >= enough, 20.0, "tokens flow")
    assert not any(answer.done() for answer in answers)
    return answers


def free(stack: Stack) -> Callable[[], bool]:
    return lambda: not any(stack.held(worker) for worker in stack.workers)


def records(stack: Stack) -> dict[str, tuple[str, str]]:
    """Phase and router of each record; searched, so that the index cannot hide one."""
    with redis.Redis.from_url(stack.redis_url, decode_responses=True) as client:
        return {
            key.rpartition(":")[2]: tuple(client.hmget(key, "phase", "router"))  # type: ignore[misc]
            for key in client.scan_iter("kvrelay:*:req:*")
        }


def indexed(stack: Stack) -> int:
    with redis.Redis.from_url(stack.redis_url) as client:
        return sum(client.zcard(key) for key in client.scan_iter("kvrelay:*:open:*"))


def of_phase(stack: Stack, phase: str) -> set[str]:
    return {leg for leg, (found, _) in records(stack).items() if found == phase}


def metric(stack: Stack, name: str) -> float:
    return metrics_at(f"{stack.url}/metrics")[name]


def retries(stack: Stack) -> float:
    page = metrics_at(f"{stack.url}/metrics")
    return page['kvrelay_attempts_total{cause="decode_lost"}']


def test_a_frozen_routers_work_is_let_go_and_goes_on_when_it_wakes(
    cluster: Stack, undisturbed: list[str]
) -> None:
    swept_before, closed_before = of_phase(cluster, "swept"), metric(cluster, SWEPT)
    with cluster.behind("frozen-router") as second, ThreadPoolExecutor(CLIENTS) as pool:
        answers = begun(pool, second, "frozen")
        second.router.kill(signal.SIGSTOP)
        try:
            took_s = until(free(cluster), LET_GO_S, "nothing of a frozen router is held")
            swept_s = until(
                lambda: len(of_phase(cluster, "swept") - swept_before) == CLIENTS,
                SWEPT_S,
                "its records are closed",
            )
        finally:
            second.router.kill(signal.SIGCONT)
        ends = [answer.result() for answer in answers]
        assert ends == [(text, ["done"]) for text in undisturbed]
        assert retries(second) >= CLIENTS, "none came to its end unheard"
        until(second.all_seen, 10.0, "it sees all workers again")
        assert ask(second, TEXT, {**bodies("frozen")[0], "max_tokens": 8}).texts
        until(lambda: of_phase(cluster, "swept") == swept_before, 2.0, "their own end is told")
        assert metric(second, CONFLICTS) == 0
    assert metric(cluster, SWEPT) == closed_before + CLIENTS
    assert indexed(cluster) == 0
    print(f"frozen router: free after {took_s:.2f} s, swept {swept_s:.2f} s later")


def test_a_killed_routers_records_are_closed_once_by_the_others(cluster: Stack) -> None:
    swept_before, closed_before = of_phase(cluster, "swept"), metric(cluster, SWEPT)
    with (
        cluster.behind("other-router") as other,
        cluster.behind("killed-router") as second,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        answers = begun(pool, second, "killed")
        second.router.end(signal.SIGKILL)
        took_s = until(free(cluster), 1.0, "nothing of a dead router is held")
        swept_s = until(
            lambda: len(of_phase(cluster, "swept") - swept_before) == CLIENTS,
            SWEPT_S,
            "its records are closed",
        )
        closed = metric(cluster, SWEPT) + metric(other, SWEPT)
        assert closed == closed_before + CLIENTS
        assert [kinds for _, kinds in (answer.result() for answer in answers)] == [
            ["cut off"]
        ] * CLIENTS
    assert indexed(cluster) == 0
    print(f"killed router: free after {took_s:.2f} s, swept {swept_s:.2f} s later")


def test_a_frozen_router_goes_on_when_it_wakes_also_while_redis_is_away(
    cluster: Stack, undisturbed: list[str]
) -> None:
    """No lease tells of it then: its beats do."""
    assert cluster.valkey.popen is not None
    with cluster.behind("frozen-router-2") as second, ThreadPoolExecutor(CLIENTS) as pool:
        answers = begun(pool, second, "frozen")
        cluster.valkey.kill(signal.SIGSTOP)
        second.router.kill(signal.SIGSTOP)
        try:
            took_s = until(free(cluster), LET_GO_S, "nothing of a frozen router is held")
            second.router.kill(signal.SIGCONT)
            ends = [answer.result() for answer in answers]
        finally:
            cluster.valkey.kill(signal.SIGCONT)
            second.router.kill(signal.SIGCONT)
        assert ends == [(text, ["done"]) for text in undisturbed]
        assert retries(second) >= CLIENTS, "none came to its end unheard"
        until(cluster.all_seen, 10.0, "all are seen again")
        until(lambda: indexed(cluster) == 0, 5.0, "nothing is open")
    print(f"frozen router without Redis: free after {took_s:.2f} s")


def test_a_router_that_starts_again_closes_what_the_one_before_left_open(cluster: Stack) -> None:
    """Where it is the only one."""
    swept_before = of_phase(cluster, "swept")
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = begun(pool, cluster, "restarted")
        cluster.router.end(signal.SIGKILL)
        cluster.router.start()
        cluster.look_around()
        swept_s = until(
            lambda: len(of_phase(cluster, "swept") - swept_before) == CLIENTS,
            SWEPT_S,
            "the records of the one before are closed",
        )
        assert [answer.result()[1] for answer in answers] == [["cut off"]] * CLIENTS
    assert metric(cluster, SWEPT) == CLIENTS
    assert indexed(cluster) == 0
    until(cluster.baseline, 2.0, "nothing is held")
    print(f"restarted router: swept {swept_s:.2f} s after it was ready")


def test_a_busy_routers_work_is_never_let_go_or_swept_when_redis_forgets_it(cluster: Stack) -> None:
    """Its live records are there again within 2 s, and nobody closes one."""
    closed_before = metric(cluster, SWEPT)
    with cluster.behind("busy-router") as second, ThreadPoolExecutor(CLIENTS) as pool:
        answers = begun(pool, second, "busy")
        with redis.Redis.from_url(cluster.redis_url) as client:
            client.flushall()
        back_s = until(lambda: indexed(cluster) == CLIENTS, 2.0, "live records are written again")
        ends = [answer.result() for answer in answers]
        assert [kinds for _, kinds in ends] == [["done"]] * CLIENTS
        phases = {phase for phase, _ in records(cluster).values()}
        until(lambda: indexed(cluster) == 0, 2.0, "and closed by their router")
        assert phases <= {"finished", "decoding"}
        until(second.all_seen, 10.0, "it sees all workers again")
    assert metric(cluster, SWEPT) == closed_before
    print(f"flushed: live records back after {back_s:.2f} s")


def test_a_router_that_stands_for_a_second_loses_nothing(cluster: Stack) -> None:
    with cluster.behind("slow-router") as second, ThreadPoolExecutor(CLIENTS) as pool:
        answers = begun(pool, second, "slow")
        second.router.kill(signal.SIGSTOP)
        time.sleep(1.0)
        second.router.kill(signal.SIGCONT)
        assert [answer.result()[1] for answer in answers] == [["done"]] * CLIENTS
        assert retries(second) == 0
