"""Redis goes away, freezes and forgets under load; nobody who talks to kvrelay can tell (L9)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from tests.stack import until
from tests.system.cluster import Cluster, RedisServer
from tests.system.load import Load

pytestmark = [pytest.mark.system, pytest.mark.leaks_allowed]  # parts are started again
OUTAGE_S = 3.0
"""Two leases."""


def stopped(server: RedisServer) -> None:
    """Its connections are refused, and it comes back empty."""
    server.stop()
    time.sleep(OUTAGE_S)
    server.start()


def frozen(server: RedisServer) -> None:
    """Its connections stay open and say nothing."""
    server.kill(signal.SIGSTOP)
    time.sleep(OUTAGE_S)
    server.kill(signal.SIGCONT)


def flushed(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


@pytest.mark.parametrize("outage", [stopped, frozen, flushed], ids=lambda f: f.__name__)
def test_a_redis_outage_is_seen_by_no_client(
    cluster: Cluster, outage: Callable[[RedisServer], None]
) -> None:
    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(4)
        before = load.done
        outage(cluster.server)
        during = load.done - before
        registered_s = until(lambda: registered(cluster) == 4, 10, "all workers are registered")
        load.wait_answers(4)
        assert cluster.seen() == 4
    assert load.wrong() == {}
    if outage is not flushed:
        assert during > 0, "new requests are served meanwhile"
    print(
        f"{outage.__name__}: {during} answers meanwhile, registered after {registered_s:.2f} s, "
        f"longest pause {load.longest_gap_s:.2f} s"
    )


def registered(cluster: Cluster) -> int:
    with cluster.server.client() as client:
        return sum(1 for _ in client.scan_iter("kvrelay:*:worker:*"))


def test_no_command_looks_at_all_keys(cluster: Cluster) -> None:
    """D14: a shared Redis may be large, and no request may pay for that."""
    with cluster.server.client() as client:
        client.config_resetstat()
        with Load(cluster.url, cluster.model) as load:
            load.wait_answers(8)
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert "evalsha" in used
    assert used.isdisjoint({"keys", "scan", "flushall", "flushdb", "smembers", "sort"})
