"""The cluster as the page shows it: workers with their pools and queues, pairs, totals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvrelay.services.router.dashboard.requests import ms, text
from kvrelay.services.router.lately import Handed, Minute, Spread
from kvrelay.services.router.membership import SeenWorker
from kvrelay.shared.kv.layout import ITEM_BYTES, KVLayout
from kvrelay.shared.store.records import WorkerRecord

MOST_WORKERS: Final = 256
MOST_PAIRS: Final = 256
_LAYOUT: Final = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,4})")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All of it at one moment."""

    model: str
    version: str
    missing: str
    """What the cluster lacks to serve as it is meant to; empty for nothing."""
    serves: bool
    store_up: bool
    port: int
    """Where clients ask."""
    in_flight: int
    queued: int
    minute: Minute
    workers: Sequence[SeenWorker]
    draining: frozenset[str]
    pairs: Mapping[tuple[str, str], Handed]


def cluster_page(facts: ClusterFacts) -> dict[str, object]:
    """Bounded however large the cluster is."""
    minute = facts.minute
    workers = sorted(facts.workers, key=lambda w: (_ORDER[w.record.role], w.record.name))
    records: dict[str, WorkerRecord] = {w.record.incarnation: w.record for w in workers}
    pairs = [
        _pair(records[prefill], records[decode], handed)
        for (prefill, decode), handed in facts.pairs.items()
        if prefill in records and decode in records
    ]
    pairs.sort(key=lambda pair: (pair["prefill"], pair["decode"]))
    return {
        "model": text(facts.model),
        "version": facts.version,
        "serves": facts.serves,
        "missing": text(facts.missing, 400),
        "store_up": facts.store_up,
        "port": facts.port,
        "totals": {
            "in_flight": facts.in_flight,
            "queued": facts.queued,
            "tokens_per_s": round(minute.tokens_per_s, 1),
            "requests_per_s": round(minute.requests_per_s, 1),
            "first_token": _spread(minute.first_token),
            "gap": _spread(minute.gap),
            "tokens_by_second": list(minute.tokens),
        },
        "workers": [_worker(worker, facts.draining) for worker in workers[:MOST_WORKERS]],
        "workers_left_out": max(len(workers) - MOST_WORKERS, 0),
        "pairs": pairs[:MOST_PAIRS],
        "pairs_left_out": max(len(pairs) - MOST_PAIRS, 0),
    }


_ORDER: Final = {"prefill": 0, "decode": 1, "both": 2}


def _spread(found: Spread) -> dict[str, object]:
    return {
        "count": found.count,
        "p50_ms": ms(found.p50_s),
        "p90_ms": ms(found.p90_s),
        "p99_ms": ms(found.p99_s),
    }


def state_of(worker: SeenWorker, draining: frozenset[str]) -> str:
    if not worker.live:
        return "not in use"
    if worker.record.incarnation in draining:
        return "draining"
    return "late" if worker.late else "ready"


def _worker(worker: SeenWorker, draining: frozenset[str]) -> dict[str, object]:
    record, load = worker.record, worker.load
    total = load.total_blocks or record.pool_blocks
    available = load.free_blocks if load.total_blocks else total
    cached = min(load.cached_blocks, available)
    return {
        "name": text(record.name),
        "incarnation": text(record.incarnation),
        "role": record.role.value,
        "state": state_of(worker, draining),
        "address": text(record.grpc_address),
        "transport": text(record.transfer_scheme),
        "blocks": {
            "total": total,
            "free": available - cached,
            "cached": cached,
            "in_use": max(total - available, 0),
            "tokens": record.block_size,
        },
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "waiting_tokens": load.waiting_tokens,
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(load.decode_tokens_per_s, 1),
    }


def _pair(prefill: WorkerRecord, decode: WorkerRecord, handed: Handed) -> dict[str, object]:
    each = token_bytes(decode)
    return {
        "prefill": text(prefill.name),
        "decode": text(decode.name),
        "prompts": handed.prompts,
        "tokens": handed.tokens,
        "bytes": None if each is None else handed.tokens * each,
    }


def token_bytes(record: WorkerRecord) -> int | None:
    """Of one token's KV, from what the worker says it is made of; None when it says otherwise."""
    found = _LAYOUT.fullmatch(record.fingerprint.get("layout", ""))
    for dtype in ITEM_BYTES:
        if found and dtype == record.fingerprint.get("dtype"):
            layers, heads, dim = map(int, found.groups())
            return KVLayout(layers, heads, dim, record.block_size, dtype).token_bytes
    return None
