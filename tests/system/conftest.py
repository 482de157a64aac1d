"""What all system tests share: a model, and one cluster of two pairs that tests may hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stack import until
from tests.system.cluster import Cluster, RedisServer
from tests.system.receiver import SpanReceiver
from tests.tinymodel import write_tiny_model

from kvrelay.shared.types import Role


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def receiver() -> Iterator[SpanReceiver]:
    with SpanReceiver() as spans:
        yield spans


@pytest.fixture(scope="session")
def hurt_cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path, receiver: SpanReceiver
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    server = RedisServer(folder)
    cluster = Cluster(folder, tiny, server, {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
    for role in (Role.PREFILL, Role.DECODE):
        for number in range(2):
            cluster.add_worker(role, f"{role}-{number}")
    try:
        # Redis comes last and late: nobody may give up on it (H14).
        for part in cluster.parts:
            part.start(wait=False)
        for part in cluster.parts:
            part.wait_ready()
        assert not cluster.ready()
        server.start()
        print(f"Redis came last: ready {cluster.wait_all_seen():.1f} s after it")
        yield cluster
    finally:
        cluster.stop()
        server.stop()


@pytest.fixture
def cluster(hurt_cluster: Cluster) -> Iterator[Cluster]:
    """Whole at the beginning of each test, and whole and idle again at its end."""
    hurt_cluster.wait_all_seen()
    yield hurt_cluster
    hurt_cluster.wait_all_seen()
    until(hurt_cluster.baseline, 10.0, "all blocks are free again")
