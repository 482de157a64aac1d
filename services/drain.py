"""`kvrelay drain`: asks one worker to go, and watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from rich.console import Console

from kvrelay.services.drain_config import DrainConfig
from kvrelay.shared.errors import KvrelayError, Unavailable
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import WorkerRecord

ASK_S = 2.0
"""For one answer of the worker."""
LOOK_S = 0.2
EXIT_S = 5.0
"""After its time a worker still takes leave of Redis and of its routers."""


def run(config: DrainConfig, console: Console) -> int:
    """The exit code. Raises `KvrelayError` when the worker is not to be found or asked."""
    return asyncio.run(_drain(config, console))


async def _drain(config: DrainConfig, console: Console) -> int:
    store = ClusterStore(config.redis_url, Keys(config.cluster))
    try:
        snapshot = await store.snapshot()
    finally:
        await store.close()
    record = chosen([view.record for view in snapshot.workers], config.worker)
    async with grpc.aio.insecure_channel(record.grpc_address, options=CHANNEL_OPTIONS) as channel:
        stub = worker_stub(channel)
        request = pb.DrainRequest()
        if config.within_s is not None:
            request.budget_ms = int(config.within_s * 1e3)
        try:
            async with asyncio.timeout(ASK_S):
                reply = await stub.Drain(request)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            raise Unavailable(f"{record.name} at {record.grpc_address} does not answer") from error
        seconds = reply.remaining_ms / 1e3
        _say(console, f"{record.name} drains: {reply.legs} requests, at most {seconds:.0f} s")
        return await _watch(console, record, stub, seconds, reply.legs)


def chosen(records: Sequence[WorkerRecord], wanted: str) -> WorkerRecord:
    """The one worker of that name or incarnation. Raises `KvrelayError` naming those there are."""
    found = [r for r in records if r.name == wanted or r.incarnation.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(sorted(f"{r.name} ({r.incarnation[:8]})" for r in found or records))
    if found:
        raise KvrelayError(f"worker: {wanted!r} is more than one: {there}")
    raise KvrelayError(f"worker: there is no {wanted!r}; alive are: {there or 'none'}")


async def _watch(
    console: Console, record: WorkerRecord, stub: object, seconds: float, legs: int
) -> int:
    """Until it is gone; tells whenever there is less to do."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + seconds
    left = legs
    while loop.time() < ends_s + EXIT_S:
        try:
            async with asyncio.timeout(ASK_S):
                reply = await stub.Inspect(pb.InspectRequest())  # type: ignore[attr-defined]
        except (grpc.aio.AioRpcError, TimeoutError):
            break
        if reply.incarnation != record.incarnation:
            break  # started again already
        if reply.legs < left:
            _say(console, f"{reply.legs} requests are left")
        left = reply.legs
        await asyncio.sleep(LOOK_S)
    else:
        raise Unavailable(f"{record.name} is there still, {EXIT_S:g} s after its time")
    cut = left if loop.time() > ends_s else 0  # before its time a worker goes only with none left
    _say(console, f"{record.name} is gone" + (f"; {cut} requests were cut off" if cut else ""))
    return int(cut > 0)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
