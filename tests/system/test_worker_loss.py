"""Workers that freeze or die under load: the clients see the same tokens, whatever happens."""

from __future__ import annotations

import signal

import pytest
from tests.stack import Process, until
from tests.system.cluster import Cluster
from tests.system.load import Load

pytestmark = [pytest.mark.system, pytest.mark.leaks_allowed]  # parts are started again


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_frozen_worker_is_left_by_its_requests_and_comes_back_as_another(
    cluster: Cluster, name: str
) -> None:
    worker = named(cluster, name)
    with Load(cluster.url, cluster.model) as load:
        before = incarnations(cluster)
        load.wait_answers(4)
        worker.kill(signal.SIGSTOP)
        noticed_s = until(lambda: cluster.seen() == 3, 10, f"{name} is missed")
        load.wait_answers(4)  # the others go on
        worker.kill(signal.SIGCONT)
        back_s = cluster.wait_all_seen()
        print(f"{name} frozen: noticed after {noticed_s:.2f} s, back after {back_s:.2f} s")
        load.wait_answers(4)
        after = incarnations(cluster)
        assert len(before - after) == 1 == len(after - before), "one came back as another"
    assert load.wrong() == {}
    print(f"{load.done} answers, longest pause {load.longest_gap_s:.2f} s")


def test_a_worker_that_freezes_while_redis_is_away_too_is_left_by_its_requests(
    cluster: Cluster,
) -> None:
    """Nobody can see its lease end then: the router's pings find it."""
    worker = named(cluster, "decode-0")
    with Load(cluster.url, cluster.model) as load:
        load.wait_answers(4)
        cluster.server.kill(signal.SIGSTOP)
        worker.kill(signal.SIGSTOP)
        noticed_s = until(lambda: cluster.seen() == 3, 15, "decode-0 is missed")
        load.wait_answers(4)
        cluster.server.kill(signal.SIGCONT)
        worker.kill(signal.SIGCONT)
        cluster.wait_all_seen()
        load.wait_answers(4)
    assert load.wrong() == {}
    print(f"frozen: noticed after {noticed_s:.2f} s, longest pause {load.longest_gap_s:.2f} s")


def test_workers_killed_and_restarted_under_load_harm_no_answer(cluster: Cluster) -> None:
    """C15, also: whoever restarts is used again without a restart of its peers."""
    names = ("prefill-1", "decode-1")
    others = {part.pid for part in cluster.parts if part.name not in names}
    with Load(cluster.url, cluster.model) as load:
        for name in names * 2:
            load.wait_answers(3)
            worker = named(cluster, name)
            worker.end(signal.SIGKILL)
            worker.start()
            cluster.wait_all_seen()
        load.wait_answers(6)
    assert load.wrong() == {}
    assert {part.pid for part in cluster.parts if part.name not in names} == others
    assert all(part.popen and part.popen.poll() is None for part in cluster.parts)
    print(f"{load.done} answers, longest pause {load.longest_gap_s:.2f} s")


def named(cluster: Cluster, name: str) -> Process:
    [worker] = [worker for worker in cluster.workers if worker.name == name]
    return worker


def incarnations(cluster: Cluster) -> set[bytes]:
    """Of the workers that hold a lease now."""
    with cluster.server.client() as client:
        return set(client.scan_iter("kvrelay:*:worker:*"))
