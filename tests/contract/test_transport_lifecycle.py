"""What a transport leaves behind (nothing), and how one is chosen and refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.shared.errors import ConfigError, PeerLost, TransferError
from kvrelay.shared.transfer import open as opening
from kvrelay.shared.transfer.open import Scheme, open_transport
from kvrelay.shared.transfer.protocol import Address, Transport
from kvrelay.shared.transfer.tcp import TcpTransport
from kvrelay.shared.transfer.ucx import UcxTransport, ucx_environment

from .test_transport import Far, Here, start_far
from .transport_child import payload

UCX = [("ucx", "all"), ("ucx", "tcp")]


def open_files() -> list[str]:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(link) for link in links if os.path.lexists(link))


def shared_memory() -> list[str]:
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    creators = {line.split()[4] for line in segments} & ours()
    return sorted(creators) + [name for name in os.listdir("/dev/shm") if name.startswith("ucx_")]


def ours() -> set[str]:
    return {str(os.getpid())}


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(params=[("tcp", "all"), *UCX], ids=["tcp", "ucx-shm", "ucx-tcp"])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheme]:
    name, tls = request.param
    if name == "ucx":
        pytest.importorskip("ucxx")
        monkeypatch.setenv("UCX_TLS", tls)
    yield name


async def serve_one_peer(scheme: Scheme, hub: Callable[[], None]) -> None:
    ...
