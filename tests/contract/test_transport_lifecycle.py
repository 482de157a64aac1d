"""What a transport leaves behind (nothing), and how one is chosen, reached and refused."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from kvrelay.shared.errors import ConfigError, PeerLost, TransferError
from kvrelay.shared.transfer import open as opening
from kvrelay.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from kvrelay.shared.transfer.open import open_transport
from kvrelay.shared.transfer.protocol import Address, Peer, Transport
from kvrelay.shared.transfer.tcp import TcpTransport
from kvrelay.shared.transfer.ucx import UcxTransport, ucx_environment

from .test_transport import Here, scheme_of, start_far
from .transport_child import payload


def held(pids: set[int]) -> dict[str, object]:
    """What these processes hold or have left of what the kernel hands out."""
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return {
        "files": len(os.listdir("/proc/self/fd")),
        # asyncio's watchers of child processes end in their own time; they are Python's threads.
        "native threads": len(os.listdir("/proc/self/task")) - threading.active_count(),
        "segments": sum(int(words[4]) in pids for words in segments),
        "files in /dev/shm": [name for name in os.listdir("/dev/shm") if name.startswith("ucx")],
    }


async def met(here: Here, seed: int) -> Peer:
    """The far end, which has sent a message under tag 1 that arrived."""
    peer, buffer = await here.meet(here.far), bytearray(100_000)
    await asyncio.gather(here.far_send(1, seed, 100_000), here.transport.recv(peer, 1, buffer))
    assert buffer == payload(seed, 100_000)
    return peer


async def use_and_kill(kind: str) -> set[int]:
    """One transport's life: a peer, a message, the peer killed, the end. Returns whose it was."""
    transport = open_transport(scheme_of(kind), host="127.0.0.1")
    address = await transport.listen()
    gc.freeze()  # as a worker does: from here on a cycle of what there is would stay
    far = await start_far(kind, LoopbackHub())
    here = Here(kind, LoopbackHub(), transport, address, far, None)  # type: ignore[arg-type]
    peer = await met(here, seed=4)
    waiting = asyncio.ensure_future(transport.recv(peer, 2, bytearray(100_000)))
    await asyncio.sleep(0)
    far.signal(signal.SIGKILL)
    assert far.process is not None
    pid = far.process.pid
    await far.process.wait()
    await transport.close()
    await transport.close()
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost):
        await transport.send(peer, 1, b"late")
    await far.stop()
    return {os.getpid(), pid}


@pytest.mark.parametrize("kind", ["tcp", "ucx-shm", "ucx-tcp"])
async def test_a_closed_transport_leaves_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.startswith("ucx"):
        pytest.importorskip("ucxx")
        monkeypatch.setenv("UCX_TLS", "tcp" if kind == "ucx-tcp" else "all")
    first = await use_and_kill(kind)  # libraries open what they keep for the process
    before = held({os.getpid()})
    second = await use_and_kill(kind)
    gc.unfreeze()
    assert held(first | second) == before
    assert before["files in /dev/shm"] == []


@pytest.mark.parametrize("kind", ["loopback", "tcp", "ucx-shm", "ucx-tcp"])
async def test_a_transport_that_starts_over_is_a_new_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was under way to the old one lies in the way of what the new one is sent."""
    if kind.startswith("ucx"):
        pytest.importorskip("ucxx")
        monkeypatch.setenv("UCX_TLS", "tcp" if kind == "ucx-tcp" else "all")
    hub = LoopbackHub()
    transport: Transport = (
        LoopbackTransport(hub)
        if kind == "loopback"
        else open_transport(scheme_of(kind), host="127.0.0.1")
    )
    far = await start_far(kind, hub)
    addresses = set()
    for seed in range(3):
        address = await transport.listen()
        addresses.add(address)
        here = Here(kind, hub, transport, address, far, None)  # type: ignore[arg-type]
        await met(here, seed)
        for _ in range(2):
            await here.far_send(1, 77, 1_000)  # nobody takes them
        await transport.close()
    assert len(addresses) == 3
    await far.stop()


@pytest.mark.parametrize("kind", ["loopback", "tcp", "ucx-shm", "ucx-tcp"])
async def test_starting_over_with_a_send_held_back_leaves_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shared memory UCX lets nobody cancel that send, and keeps its worker for it."""
    if kind.startswith("ucx"):
        pytest.importorskip("ucxx")
        monkeypatch.setenv("UCX_TLS", "tcp" if kind == "ucx-tcp" else "all")
    hub = LoopbackHub()
    transport: Transport = (
        LoopbackTransport(hub)
        if kind == "loopback"
        else open_transport(scheme_of(kind), host="127.0.0.1")
    )
    far = await start_far(kind, hub)
    address, addresses, files = await transport.listen(), [], []
    for life in range(5):
        addresses.append(address)
        here = Here(kind, hub, transport, address, far, None)  # type: ignore[arg-type]
        peer, buffer = await here.meet(far), bytearray(100_000)
        await asyncio.gather(
            here.far_send(100 + life, life, len(buffer)), transport.recv(peer, 100 + life, buffer)
        )
        assert buffer == payload(life, len(buffer))
        kept = [
            asyncio.ensure_future(transport.send(peer, 200 + life, payload(life, 4_000_000)))
            for _ in range(40)
        ]
        waiting = asyncio.ensure_future(transport.recv(peer, 300 + life, bytearray(8)))
        await asyncio.sleep(0)
        files.append(len(os.listdir("/proc/self/fd")))
        await far.ask("close_peer", address=address.value.hex())
        address = await transport.start_over()
        outcomes = await asyncio.gather(*kept, waiting, return_exceptions=True)
        assert not peer.alive
        assert isinstance(outcomes[-1], PeerLost)
    assert len({*addresses, address}) == 6
    assert max(files[1:]) <= files[0]
    await transport.close()
    await far.stop()


async def pair(**settings: int | float) -> tuple[TcpTransport, Address]:
    transport = TcpTransport("127.0.0.1", **settings)  # type: ignore[arg-type]
    return transport, await transport.listen()


def port_of(address: Address) -> int:
    return int(address.value.split()[1])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"KVRT\x09\x00" + bytes(18),
        b"KVRT\x01\x00\x00\x00" + bytes(8) + b"\xff" * 8,
        b"KVRT\x01\x00\x01\x00" + bytes(16),
    ],
    ids=["http", "version", "huge hello", "no hello"],
)
async def test_garbage_closes_its_own_socket_only(garbage: bytes) -> None:
    (one, _), (two, address) = await pair(), await pair()
    peer = await one.connect(address)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    writer.write(garbage)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(10_000)  # ours is the hello, then the end
    writer.close()
    buffer = bytearray(4)
    back = await two.connect(Address("tcp", one._own))
    await asyncio.gather(one.send(peer, 1, b"fine"), two.recv(back, 1, buffer))
    assert buffer == b"fine"
    await one.close()
    await two.close()


async def test_a_stranger_who_says_nothing_is_dropped() -> None:
    transport, address = await pair(connect_timeout_s=0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(10_000)
    writer.close()
    await transport.close()


async def test_a_claimed_size_allocates_nothing_beyond_the_bound() -> None:
    transport, address = await pair(unexpected_bytes=1000)
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    hello = b"KVRT\x01\x00\x00\x00" + bytes(8) + (4).to_bytes(8, "little") + b"me 1"
    claim = b"KVRT\x01\x00\x01\x00" + bytes(8) + (2**39).to_bytes(8, "little")
    writer.write(hello + claim)
    await writer.drain()
    while not transport._mailbox._blocked:  # noqa: ASYNC110 - the reader stops without an event
        await asyncio.sleep(0)
    assert transport._mailbox.kept_bytes == 0
    writer.close()
    await transport.close()


async def test_too_much_that_nobody_waits_for_holds_the_sender_back() -> None:
    (one, own), (two, address) = await pair(), await pair(unexpected_bytes=3_000_000)
    peer, back = await one.connect(address), await two.connect(own)
    size, count = 2_000_000, 20
    sends = [asyncio.ensure_future(one.send(peer, tag, payload(tag, size))) for tag in range(count)]
    while not two._mailbox._blocked:  # noqa: ASYNC110 - the reader stops without an event
        await asyncio.sleep(0)
    assert two._mailbox.kept_bytes == size
    assert not sends[-1].done()
    for tag in range(count):
        buffer = bytearray(size)
        await two.recv(back, tag, buffer)
        assert buffer == payload(tag, size)
    await asyncio.gather(*sends)
    assert two._mailbox.kept_bytes == 0
    await one.close()
    await two.close()


async def test_the_next_process_on_a_port_is_not_taken_for_the_last() -> None:
    (one, _), (two, address) = await pair(), await pair()
    await two.close()
    with pytest.raises(PeerLost, match="cannot reach"):
        await one.connect(address)
    three, _ = await pair(port=port_of(address))
    with pytest.raises(PeerLost, match="another process now answers at"):
        await one.connect(address)
    await one.close()
    await three.close()


async def test_both_ends_learn_that_a_tcp_peer_is_gone() -> None:
    (one, own), (two, address) = await pair(), await pair()
    peer, back = await one.connect(address), await two.connect(own)
    waiting = asyncio.ensure_future(one.recv(peer, 1, bytearray(4)))
    await two.close_peer(back)
    with pytest.raises(PeerLost):
        await waiting
    assert not peer.alive
    await one.close()
    await two.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "a host"])
def test_an_address_that_nobody_can_reach_is_not_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        TcpTransport("127.0.0.1", host or " ")
    assert TcpTransport("0.0.0.0", "worker-1.cluster").describe() == "tcp (asyncio streams)"


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await pair(port=port)


async def test_a_ucx_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ucxx")
    monkeypatch.setenv("UCX_TLS", "nonsense")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    with pytest.raises(TransferError, match="UCX cannot start"):
        await UcxTransport().listen()


def test_auto_falls_back_to_tcp_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "ucx_installed", lambda: False)
    with caplog.at_level(logging.WARNING):
        transport = open_transport("auto", host="127.0.0.1")
    assert isinstance(transport, TcpTransport)
    assert [record.message for record in caplog.records] == [
        "UCX is not installed: KV blocks travel over plain TCP, which is slower"
    ]


def test_auto_prefers_ucx_and_sets_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "ucx_installed", lambda: True)
    environ = {"UCX_RNDV_SCHEME": "am"}
    assert isinstance(open_transport("auto", host="", environ=environ), UcxTransport)
    assert environ["UCX_RNDV_SCHEME"] == "am"
    assert environ["UCX_TCP_SNDBUF"] == "4m"


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ConfigError, match="must be auto, ucx or tcp, got 'rdma'"):
        open_transport("rdma", host="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tls", "pulls"),
    [(None, True), ("all", True), ("sm,tcp", True), ("^rc", True), ("tcp", False), ("rc:x", False)],
)
def test_the_pulling_scheme_is_for_shared_memory(tls: str | None, pulls: bool) -> None:
    environ = {} if tls is None else {"UCX_TLS": tls}
    added = ucx_environment(environ)
    assert ("UCX_RNDV_SCHEME" in added) == pulls
    assert "UCX_TLS" not in added
    assert ucx_environment({**environ, **added}) == {}
