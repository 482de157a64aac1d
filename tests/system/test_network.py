"""Parts on different hosts and in containers, as far as one machine can have them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.stack import metrics
from tests.system.cluster import Cluster, Place, RedisServer
from tests.system.load import PROMPTS, ask

from kvrelay.shared.types import Role

pytestmark = pytest.mark.system
BRIDGE, HOST = "kvrelay-t", Place("10.213.77.1")
HOSTS = {"kvrelay-p": "10.213.77.2", "kvrelay-d": "10.213.77.3"}
PREFILL, DECODE = (Place.netns(name, address) for name, address in HOSTS.items())
SMALL_SHM = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"'


@pytest.fixture(scope="module")
def bridge() -> Iterator[None]:
    """This machine, the prefill worker's and the decode worker's hosts on one wire."""
    with ExitStack() as undo:
        run(f"ip link add {BRIDGE} type bridge")
        undo.callback(run, f"ip link del {BRIDGE}")
        run(f"ip addr add {HOST.address}/24 dev {BRIDGE}")
        run(f"ip link set {BRIDGE} up")
        for name, address in HOSTS.items():
            run(f"ip netns add {name}")
            undo.callback(run, f"ip netns del {name}")
            run(f"ip link add {name}-0 type veth peer name eth0 netns {name}")
            run(f"ip link set {name}-0 master {BRIDGE} up")
            run(f"ip -n {name} addr add {address}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
        yield


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_workers_on_other_hosts_are_found_and_relay(
    bridge: None, transport: str, tiny: Path, tmp_path: Path
) -> None:
    """E05: they bind to all addresses, and tell the others one that works."""
    server = RedisServer(tmp_path, HOST)
    cluster = Cluster(tmp_path, tiny, server, {"UCX_TLS": "tcp"}, HOST)
    prefill = cluster.add_worker(Role.PREFILL, "prefill", PREFILL, transport=transport)
    decode = cluster.add_worker(Role.DECODE, "decode", DECODE, transport=transport)
    try:
        server.start()
        cluster.start()
        assert prefill.detail["address"].startswith(f"{PREFILL.address}:")
        assert decode.detail["address"].startswith(f"{DECODE.address}:")
        assert prefill.detail["relay"].startswith(transport)
        for prompt in PROMPTS:
            assert ask(cluster.url, cluster.model, prompt, 20).error == ""
        sent = metrics(prefill)['kvrelay_relay_bytes_total{direction="sent"}']
        assert metrics(decode)['kvrelay_relay_bytes_total{direction="received"}'] == sent > 0
        with server.client() as client:
            records = [client.get(key) for key in client.scan_iter("kvrelay:*:worker:*")]
        assert len(records) == 2
        assert not any(b"0.0.0.0" in record or b"127.0.0.1" in record for record in records)
    finally:
        cluster.stop()
        server.stop()


@pytest.mark.parametrize("apart", ["--mount", "--mount --ipc"])
def test_a_tiny_dev_shm_stops_no_relay(apart: str, tiny: Path, tmp_path: Path) -> None:
    """E07: as in containers, with and without a common IPC namespace."""
    container = Place(entry=("unshare", *apart.split(), "sh", "-c", SMALL_SHM))
    server = RedisServer(tmp_path)
    cluster = Cluster(tmp_path, tiny, server)
    prefill = cluster.add_worker(Role.PREFILL, "prefill", container)
    cluster.add_worker(Role.DECODE, "decode", container)
    try:
        server.start()
        cluster.start()
        for prompt in PROMPTS:
            assert ask(cluster.url, cluster.model, prompt, 20).error == ""
        assert metrics(prefill)['kvrelay_relay_chunks_total{direction="sent"}'] >= len(PROMPTS)
        print(apart, prefill.detail["relay"])
    finally:
        cluster.stop()
        server.stop()
