"""`kvrelay drain`: asks one worker to go, and watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from rich.console import Console

from kvrelay.services.drain_config import DrainConfig
from kvrelay.shared.errors import KvrelayError, StoreError, Unavailable
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.directory import ClusterSnapshot, ClusterStore
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import WorkerRecord

ASK_S = 2.0
"""For one answer of the worker."""
LOOK_S = 0.2
REDIS_S = 2.0
EXIT_S = 5.0
"""After its time a worker still takes leave of Redis and of its routers."""


def run(config: DrainConfig, console: Console) -> int:
    """The exit code. Raises `KvrelayError` when the worker is not to be found or asked."""
    return asyncio.run(_drain(config, console))


async def _drain(config: DrainConfig, console: Console) -> int:
    snapshot = await _snapshot(config)
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
        return await _watch(config, console, record, stub, seconds, reply.legs)


async def _snapshot(config: DrainConfig) -> ClusterSnapshot:
    """Raises `StoreError`. A router's patience with Redis is short; a person has more."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + REDIS_S
    store = ClusterStore(config.redis_url, Keys(config.cluster))
    try:
        while True:
            try:
                return await store.snapshot()
            except StoreError:
                if loop.time() > ends_s:
                    raise
                await asyncio.sleep(LOOK_S)
    finally:
        await store.close()


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
    config: DrainConfig,
    console: Console,
    record: WorkerRecord,
    stub: object,
    seconds: float,
    legs: int,
) -> int:
    """Until it is gone; tells whenever there is less to do."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + seconds
    left = legs
    while loop.time() < ends_s + EXIT_S:
        try:
            async with asyncio.timeout(ASK_S):
                reply = await stub.Inspect(pb.InspectRequest())  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            break
        except TimeoutError:
            continue  # frozen, perhaps: it is not gone
        if reply.incarnation != record.incarnation:
            break  # started again already
        if reply.legs < left:
            _say(console, f"{reply.legs} requests are left")
        left = reply.legs
        await asyncio.sleep(LOOK_S)
    else:
        raise Unavailable(f"{record.name} is there still, {EXIT_S:g} s after its time")
    here = {view.record.incarnation for view in (await _snapshot(config)).workers}
    if record.incarnation in here:
        _say(console, f"{record.name} ended without taking its leave; {left} requests were with it")
        return 1
    late = left if loop.time() > ends_s else 0  # before its time it goes only with none left
    still = f"; {late} requests were still with it when its time was up" if late else ""
    _say(console, f"{record.name} is gone{still}")
    return int(late > 0)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
