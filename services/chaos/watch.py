"""What is seen of the parts from outside: gauges, what workers hold, and how processes grow."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvrelay.services.chaos.client import Place, get
from kvrelay.services.chaos.cluster import ChaosCluster, Kept
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub

POLL_S = 0.02
ASK_S = 0.25
"""A worker that a rule has frozen does not hold up what the others are asked."""
HELD = (
    'kvrelay_pool_blocks{state="in_use"}',
    'kvrelay_pool_blocks{state="quarantined"}',
    "kvrelay_requests_waiting",
    "kvrelay_requests_running",
)
COUNTED = (
    "kvrelay_chaos_injected_total",
    "kvrelay_transfer_faults_total",
    "kvrelay_attempts_total",
)


def samples(page: str) -> dict[str, float]:
    """Every sample of a Prometheus page, by its full name."""
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def place_of(address: object) -> Place:
    host, _, port = str(address).rpartition(":")
    return host, int(port)


async def worker_page(kept: Kept) -> dict[str, float]:
    return samples(await get(place_of(kept.part.detail["metrics"]), "/metrics"))


async def ready_workers(cluster: ChaosCluster, role: str = "") -> int:
    """How many the router can use, of a role or of all."""
    page = samples(await get(cluster.url, "/metrics"))
    wanted = f'role="{role}"' if role else ""
    ready = [v for name, v in page.items() if 'state="ready"' in name and wanted in name]
    return round(sum(ready))


async def until_all_seen(place: Place, workers: int, seconds: float = 60.0) -> None:
    """Until a router can use so many workers."""
    async with asyncio.timeout(seconds):
        while True:
            page = samples(await get(place, "/metrics"))
            if sum(v for name, v in page.items() if 'state="ready"' in name) == workers:
                return
            await asyncio.sleep(POLL_S)


async def inspect(kept: Kept, seconds: float = 2.0) -> pb.InspectReply | None:
    """What a worker says of its pool; None when it does not answer."""
    address = str(kept.part.detail["address"])
    try:
        async with (
            asyncio.timeout(seconds),
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
        ):
            reply: pb.InspectReply = await worker_stub(channel).Inspect(pb.InspectRequest())
            return reply
    except (grpc.RpcError, TimeoutError):
        return None


async def free_s(
    cluster: ChaosCluster, request_id: str, limit_s: float = 5.0
) -> tuple[float, frozenset[str]]:
    """How long after now no worker holds a block for a request; and who held one at all.

    Of a worker that dies or stands still nobody asks it, then or later.
    """
    begun_s = time.monotonic()
    lives = {kept.name: kept.disturbed for kept in cluster.workers if kept.hurtable}
    held: set[str] = set()
    while (took_s := time.monotonic() - begun_s) < limit_s:
        asked = [k for k in cluster.workers if k.hurtable and lives.get(k.name) == k.disturbed]
        replies = await asyncio.gather(*(inspect(kept, ASK_S) for kept in asked))
        now = {
            kept.name
            for kept, reply in zip(asked, replies, strict=True)
            if reply and any(request_id in holder for holder in reply.holders)
        }
        if not now:
            break
        held |= now
    return took_s, frozenset(held)


@dataclass(frozen=True, slots=True)
class Rest:
    """The cluster after the last client."""

    took_s: float
    """Until nothing was held any more, or the wait was given up."""
    leaked_blocks: int
    holders: tuple[str, ...]
    gauges: dict[str, float]
    """Those off their baseline."""
    audit: tuple[str, ...]
    """What has no owner, in the words of `kvrelay audit`."""


async def at_rest(cluster: ChaosCluster, limit_s: float = 5.0) -> Rest:
    """Wait for rest; then what is still held has no owner."""
    begun_s = time.monotonic()
    gauges = await held(cluster)
    while gauges and time.monotonic() - begun_s < limit_s:
        await asyncio.sleep(POLL_S)
        gauges = await held(cluster)
    took_s = time.monotonic() - begun_s
    blocks, holders = await leaked(cluster)
    return Rest(took_s, blocks, holders, gauges, await audited(cluster))


async def audited(cluster: ChaosCluster) -> tuple[str, ...]:
    """What `kvrelay audit` finds, and whom it could not ask."""
    process = await asyncio.create_subprocess_exec(
        *cluster.audit, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, errors = await process.communicate()
    if not said:
        return (errors.decode(errors="replace").strip() or f"exit code {process.returncode}",)
    report = json.loads(said)
    found = [f"{each['where']}: {each['what']}" for each in report["findings"]]
    return (*found, *(f"{each['who']} not asked: {each['why']}" for each in report["unasked"]))


async def held(cluster: ChaosCluster) -> dict[str, float]:
    off: dict[str, float] = {}
    for kept in cluster.workers:
        page = await worker_page(kept)
        off |= {f"{kept.name} {name}": page.get(name, -1.0) for name in HELD if page.get(name) != 0}
    in_flight = samples(await get(cluster.url, "/metrics")).get("kvrelay_requests_in_flight")
    return off if in_flight == 0 else {**off, "router kvrelay_requests_in_flight": in_flight or -1}


async def leaked(cluster: ChaosCluster) -> tuple[int, tuple[str, ...]]:
    """Blocks that somebody holds at rest, and the legs they are held for."""
    blocks, holders = 0, []
    for kept in cluster.workers:
        reply = await inspect(kept)
        if reply is None:
            holders.append(f"{kept.name} does not answer")
            continue
        blocks += reply.in_use_blocks + reply.quarantined_blocks
        holders += [f"{kept.name}: {holder}" for holder in reply.holders]
    return blocks, tuple(holders)


class Faults:
    """What the parts counted, over all lives whose pages were seen in time."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], dict[str, float]] = {}

    async def look(self, cluster: ChaosCluster) -> None:
        for kept in cluster.workers:
            if kept.hurtable:
                self.note(kept, await worker_page(kept))
        self.note(cluster.router, samples(await get(cluster.url, "/metrics")))

    def note(self, kept: Kept, page: dict[str, float]) -> None:
        counted = {name: v for name, v in page.items() if name.startswith(COUNTED) and v}
        self._seen.setdefault((kept.name, kept.starts), {}).update(counted)

    def total(self) -> dict[str, int]:
        out: Counter[str] = Counter()
        for counted in self._seen.values():
            out.update({name.removeprefix("kvrelay_"): round(v) for name, v in counted.items()})
        return dict(sorted(out.items()))


@dataclass(frozen=True, slots=True)
class Size:
    """One process at one moment."""

    pid: int
    rss_bytes: int
    descriptors: int
    threads: int


def size_of(pid: int) -> Size:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    rss = int(fields["VmRSS"].split()[0]) * 1024
    return Size(pid, rss, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def sizes(kept: Iterable[Kept]) -> dict[str, Size]:
    """Of those that serve; nothing outside Linux."""
    if not Path("/proc/self/status").exists():
        return {}
    return {each.name: size_of(each.part.pid) for each in kept if each.up and each.part.pid}
