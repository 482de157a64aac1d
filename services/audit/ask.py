"""Asks the processes: workers by gRPC, routers by HTTP. Each answers soon or is told as silent."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvrelay.services.audit.facts import HeldLeg, RoutedLeg, RouterAnswer, WorkerAnswer
from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS, ref_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.store.blocks import split
from kvrelay.shared.store.records import RouterRecord, WorkerRecord
from kvrelay.shared.types import LegRef

WORKER_S: Final = 3.0
"""Longer than a worker itself waits for its engine."""
ROUTER_S: Final = 2.0
MOST_BYTES: Final = 64 << 20


class Absent(Exception):
    """There is no such process."""


class Silent(Exception):
    """It may be there, and gives no answer."""


@dataclass(frozen=True, slots=True)
class RouterPage:
    record: RouterRecord
    """Whose token was right."""
    router: str
    """Its name with the workers and in the ledger."""
    answer: RouterAnswer


async def ask_worker(record: WorkerRecord) -> WorkerAnswer:
    """Raises `Absent` or `Silent`."""
    address = record.grpc_address
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            reply = await worker_stub(channel).Audit(pb.AuditRequest(), timeout=WORKER_S)
        except grpc.aio.AioRpcError as error:
            raise _worker_problem(error, address) from error
    if reply.incarnation != record.incarnation:
        raise Absent(f"at {address} there is {reply.incarnation[:12]} now")
    return WorkerAnswer(
        legs=tuple(
            HeldLeg(ref_from_wire(leg.ref), leg.router, leg.phase, leg.blocks) for leg in reply.legs
        ),
        total_blocks=reply.total_blocks,
        available_blocks=reply.free_blocks + reply.cached_idle_blocks,
        waiting=reply.waiting,
        running=reply.running,
        problem=reply.problem,
        digests=frozenset(split(reply.digests)),
        expected=tuple(map(ref_from_wire, reply.expected)),
        kept_bytes=reply.kept_bytes,
    )


def _worker_problem(error: grpc.aio.AioRpcError, address: str) -> Absent | Silent:
    details = " ".join((error.details() or "").split())[:200]
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        if "refused" in details.lower():
            return Absent(f"nobody listens at {address}")
        if any(word in details.lower() for word in ("closed", "reset", "broken pipe")):
            return Absent(f"{address} closed the connection")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Silent("its version of kvrelay knows no audit")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "engine" in details:
        return Silent(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Silent(f"{address} does not answer within {WORKER_S:g} s")
    return Silent(f"{address}: {details or error.code().name}")


async def ask_router(url: str, records: Iterable[RouterRecord]) -> RouterPage:
    """Whichever of them it is. Raises `Absent` or `Silent`."""
    for record in records:
        page = await asyncio.to_thread(_fetch, url, record.admin_token)
        if page is not None:
            return _router_page(page, record, url)
    raise Silent(f"{url} is no router that this cluster's Redis knows")


def _fetch(url: str, token: str) -> object | None:
    """None when the token is another's."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    question = urllib.request.Request(
        f"{url.rstrip('/')}/admin/legs", headers={"authorization": f"Bearer {token}"}
    )
    try:
        with opener.open(question, timeout=ROUTER_S) as answer:
            page: object = json.loads(answer.read(MOST_BYTES))
            return page
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return None
        if error.code == 404:
            raise Silent("its version of kvrelay knows no audit") from error
        raise Silent(f"{url} answers {error.code}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise Absent(f"nobody listens at {url}") from error
        raise Silent(f"{url} does not answer: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Silent(f"{url} does not answer within {ROUTER_S:g} s: {error}") from error
    except ValueError as error:
        raise Silent(f"{url} does not answer as a router does") from error


def _router_page(page: Any, record: RouterRecord, url: str) -> RouterPage:
    try:
        legs = tuple(
            RoutedLeg(
                LegRef(leg["leg"], leg["attempt"], int(leg["nonce"], 16)),
                leg["stage"],
                frozenset(leg["told"]),
            )
            for leg in page["legs"]
        )
        counts = ("requests_in_flight", "requests", "queued", "waiting_legs")
        answer = RouterAnswer(legs, *(int(page[name]) for name in counts))
        return RouterPage(record, str(page["router"]), answer)
    except (KeyError, TypeError, ValueError) as error:
        raise Silent(f"{url} does not answer as a router does") from error
