"""Clients that sentinels send to the master, and to the next one; real servers and sentinels."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from kvrelay.services.valkey import free_port, server_binary
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.store.connection import Line, connect, connect_async, server_name
from kvrelay.shared.store.sentinel import parse_sentinel


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("", "sentinels"),
        ("h:1", "service"),
        ("h:1/bad name", "service"),
        ("h:1/main/x", "database"),
        ("h:99999/main", "65535"),
        ("h:1,/main", "host:port"),
        ("h:1/main?db=1", "options"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_without_its_password(rest: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        connect(f"redis+sentinel://u:hidden@{rest}", 1.0)
    assert "hidden" not in str(caught.value)


def test_a_url_is_read() -> None:
    url = parse_sentinel("redis+sentinel://u:p%40@a:1,[::1]:2,b/main/3")
    assert url.sentinels == (("a", 1), ("::1", 2), ("b", 26379))
    assert (url.service, url.database, url.user, url.password) == ("main", 3, "u", "p@")
    assert server_name("redis+sentinel://u:p@a:1,b/main/3") == "a:1,b"


@dataclass
class Group:
    """A master, its replica and two sentinels."""

    folder: Path
    ends: ExitStack
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(4)])
    parts: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        master, replica, *sentinels = self.ports
        self._run("--port", str(master))
        self._run("--port", str(replica), "--replicaof", "127.0.0.1", str(master))
        until(lambda: self.at(replica).info("replication")["master_link_status"] == "up")
        for port in sentinels:
            config = self.folder / f"{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\n"
                f"sentinel monitor main 127.0.0.1 {master} 1\n"
                "sentinel down-after-milliseconds main 300\n"
                "sentinel failover-timeout main 2000\n"
            )
            self._run(str(config), "--sentinel", server=False)
            until(lambda port=port: self._knows_replica(port))

    def at(self, port: int) -> redis.Redis:
        client = redis.Redis(port=port, socket_timeout=1.0)
        self.ends.callback(client.close)
        return client

    def _knows_replica(self, port: int) -> bool:
        return int(self.at(port).sentinel_master("main")["num-slaves"]) == 1

    def _run(self, *arguments: str, server: bool = True) -> None:
        own = ("--bind", "127.0.0.1", "--save", "", "--repl-diskless-sync-delay", "0")
        command = [server_binary(), *arguments, *(own if server else ())]
        part = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        self.parts.append(part)
        self.ends.callback(part.wait)
        self.ends.callback(part.kill)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports[2:])
        return f"redis+sentinel://{hosts}/main/2"


def until(reached: Callable[[], object], seconds: float = 20.0) -> None:
    deadline_s = time.monotonic() + seconds
    while True:
        try:
            if reached():
                return
        except (redis.RedisError, OSError):
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # paced: another program, which sets no event


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as ends:
        found = Group(tmp_path, ends)
        found.start()
        yield found


def test_every_kind_of_client_goes_on_with_the_next_master(group: Group) -> None:
    client = connect(group.url, 1.0)
    line = Line(client)
    packed = line.pack("INCRBY", "line", 1)

    async def run() -> None:
        both = connect_async(group.url, 2)
        try:
            assert await both.incr("loop") == 1
            assert client.incr("thread") == 1 and line.ask(packed) == b":1\r\n"
            assert group.at(group.ports[0]).info("keyspace")["db2"]["keys"] == 3
            assert group.at(group.ports[0]).wait(1, 5000) == 1
            group.parts[0].kill()  # the replica becomes the master
            await asyncio.to_thread(until, lambda: client.incr("thread"))
            await asyncio.to_thread(until, lambda: line.ask(packed).startswith(b":"))
            async with asyncio.timeout(20):
                while True:
                    try:
                        await both.incr("loop")
                        break
                    except (redis.RedisError, OSError):
                        await asyncio.sleep(0.05)
        finally:
            await both.aclose()

    try:
        asyncio.run(run())
        there = group.at(group.ports[1])
        assert there.info("replication")["role"] == "master"
    finally:
        line.close()
        client.close()
