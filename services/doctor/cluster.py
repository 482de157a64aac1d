"""Looks at a cluster: asks its Redis who is there, each worker how it is, each pair to relay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import grpc

from kvrelay.services.doctor.report import Cluster, Pair, Redis, Router, Worker
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.census import Census, Registered, take_census
from kvrelay.shared.store.connection import CONNECT_S, connect, mapped_errors, server_name
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import WorkerRecord
from kvrelay.shared.types import Role

ASK_DEADLINE_S: Final = 2.0
PROBE_DEADLINE_S: Final = 5.0
PROBE_BYTES: Final = 1 << 20
PROBE_ROUNDS: Final = 4
ROUNDS: Final = 5
"""Of questions whose fastest answer counts."""


async def look_at_cluster(url: str, name: str) -> Cluster:
    """Raises `StoreError` when Redis does not answer."""
    facts, census = await asyncio.to_thread(_ask_redis, url, Keys(name))
    workers = await asyncio.gather(*map(_ask_worker, census.workers))
    well = {worker.incarnation: worker for worker in workers if worker.transport}
    records = [each.record for each in census.workers if each.record.incarnation in well]
    pairs = []
    for prefill, decode in partners(records):  # one after the other: each alone on its lane
        pair = await _ask_pair(prefill, decode)
        ends = well[prefill.incarnation], well[decode.incarnation]
        offset_ms = ends[1].clock_offset_ms - ends[0].clock_offset_ms
        pairs.append(replace(pair, clock_offset_ms=offset_ms))
    routers = tuple(
        Router(
            each.record.name, each.record.incarnation, each.record.http_address, each.lease_age_ms
        )
        for each in census.routers
    )
    return Cluster(name, facts, routers, tuple(workers), tuple(pairs), census.rejected)


def partners(records: Sequence[WorkerRecord]) -> list[tuple[WorkerRecord, WorkerRecord]]:
    return [
        (prefill, decode)
        for prefill in records
        if prefill.role is Role.PREFILL
        for decode in records
        if decode.role is Role.DECODE and decode.group == prefill.group
    ]


def _ask_redis(url: str, keys: Keys) -> tuple[Redis, Census]:
    client = connect(url, CONNECT_S)
    try:
        with mapped_errors(url):
            client.ping()
            trips = []
            for _ in range(ROUNDS):
                begun_s = time.perf_counter()
                client.ping()
                trips.append(time.perf_counter() - begun_s)
            census = take_census(client, keys)
            facts = _facts(server_name(url), min(trips) * 1e3, client.info())
        return facts, census
    finally:
        client.close()


def _facts(address: str, round_trip_ms: float, info: Any) -> Redis:
    version = info.get("valkey_version") or info.get("redis_version", "unknown")
    name = "Valkey" if "valkey_version" in info else "Redis"
    saved = info.get("rdb_last_bgsave_status", "ok") == "ok"
    return Redis(
        address=address,
        version=f"{name} {version}",
        mode=str(info.get("redis_mode") or info.get("server_mode") or "standalone"),
        round_trip_ms=round_trip_ms,
        max_memory_bytes=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "unknown")),
        persistence="append-only file" if info.get("aof_enabled") else "none or snapshots",
        refuses_writes=not saved,
    )


async def _ask_worker(found: Registered[WorkerRecord]) -> Worker:
    record = found.record
    worker = Worker(
        name=record.name,
        role=record.role.value,
        incarnation=record.incarnation,
        model=record.model,
        address=record.grpc_address,
        group=record.group,
        fingerprint=dict(record.fingerprint),
        lease_age_ms=found.lease_age_ms,
    )
    try:
        async with asyncio.timeout(ASK_DEADLINE_S), _channel(record) as channel:
            stub = worker_stub(channel)
            said: pb.InspectReply = await stub.Inspect(pb.InspectRequest())
            problem = "" if said.healthy else "its engine makes no progress"
            if said.incarnation != record.incarnation:
                problem = "another worker answers at its address"
            best = None
            for _ in range(ROUNDS):
                begun_ns, begun_wall_ns = time.perf_counter_ns(), time.time_ns()
                reply: pb.ProbeReply = await stub.Probe(pb.ProbeRequest())
                took_ns = time.perf_counter_ns() - begun_ns
                sample = took_ns, reply.wall_ns - begun_wall_ns - took_ns // 2
                best = min(best or sample, sample)
    except (grpc.RpcError, TimeoutError) as error:
        return replace(worker, problem=f"does not answer: {_reason(error)}")
    took_ns, offset_ns = best or (0, 0)
    return replace(
        worker,
        problem=problem,
        transport=reply.transport,
        round_trip_ms=took_ns / 1e6,
        clock_offset_ms=offset_ns / 1e6,
    )


async def _ask_pair(prefill: WorkerRecord, decode: WorkerRecord) -> Pair:
    pair = Pair(prefill.incarnation, decode.incarnation)
    try:
        async with (
            asyncio.timeout(PROBE_DEADLINE_S),
            _channel(decode) as to_decode,
            _channel(prefill) as to_prefill,
        ):
            listen = pb.ProbeRequest(prefill=_peer(prefill))
            await worker_stub(to_decode).Probe(listen)
            ask = pb.ProbeRequest(decode=_peer(decode), body_bytes=PROBE_BYTES, rounds=PROBE_ROUNDS)
            reply: pb.ProbeReply = await worker_stub(to_prefill).Probe(ask)
    except (grpc.RpcError, TimeoutError) as error:
        return replace(pair, problem=_reason(error))
    lane = reply.lane
    return replace(
        pair,
        problem=lane.problem,
        carried_by=lane.carried_by,
        round_trip_ms=lane.round_trip_ns / 1e6,
        mb_per_s=lane.bytes_per_s / 1e6,
    )


def _channel(record: WorkerRecord) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(record.grpc_address, options=CHANNEL_OPTIONS)


def _peer(record: WorkerRecord) -> pb.Peer:
    return pb.Peer(
        incarnation=record.incarnation,
        scheme=record.transfer_scheme,
        address=record.transfer_address,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return "no answer in time"
