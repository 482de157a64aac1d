"""A process at the far end of a transport: obeys JSON lines on stdin, answers on stdout.

Payloads are not piped: both ends derive them from a seed and compare checksums.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.transfer.open import Scheme, open_transport
from kvrelay.shared.transfer.protocol import Address, Peer, Transport
from kvrelay.shared.transfer.wire import checksum


def payload(seed: int, size: int) -> bytes:
    """Bytes that differ between seeds and between places."""
    unit = b"".join(((seed * 1_000_003 + at) % 2**32).to_bytes(4, "little") for at in range(1021))
    return (unit * (size // len(unit) + 1))[:size]


class FarEnd:
    """One transport that does what the commands say, many at a time."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.peers: dict[str, Peer] = {}

    async def obey(self, command: dict[str, Any]) -> Any:
        operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "listen": self.listen,
            "connect": self.connect,
            "close_peer": self.close_peer,
            "send": self.send,
            "recv": self.recv,
        }
        arguments = {key: value for key, value in command.items() if key not in ("id", "op")}
        return await operations[command["op"]](**arguments)

    async def listen(self) -> str:
        return (await self.transport.listen()).value.hex()

    async def connect(self, scheme: str, address: str) -> None:
        self.peers[address] = await self.transport.connect(Address(scheme, bytes.fromhex(address)))

    async def close_peer(self, address: str) -> None:
        await self.transport.close_peer(self.peers.pop(address))

    async def send(self, address: str, tag: int, seed: int, size: int) -> None:
        await self.transport.send(self.peers[address], tag, payload(seed, size))

    async def recv(self, address: str, tag: int, size: int) -> int:
        buffer = bytearray(size)
        await self.transport.recv(self.peers[address], tag, buffer)
        return checksum([buffer])


async def answer(far: FarEnd, line: bytes) -> None:
    command = json.loads(line)
    try:
        reply = {"id": command["id"], "value": await far.obey(command)}
    except KvrelayError as error:
        reply = {"id": command["id"], "error": f"{type(error).__name__}: {error}"}
    os.write(1, json.dumps(reply).encode() + b"\n")


async def main(scheme: str) -> None:
    far = FarEnd(open_transport(cast("Scheme", scheme), host="127.0.0.1"))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(answer(far, line))
    await far.transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
