"""A worker's answer to an audit: the engine's, given in its turn, and what the relay adds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvrelay.shared.engine import messages as m
from kvrelay.shared.rpc.convert import ref_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import LegRef

ENGINE_S: Final = 2.0
"""Ten of the longest steps that are planned: an engine that makes no turn meanwhile is wedged."""


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """What the relay has in its hands."""

    expected: list[LegRef]
    receiving_lanes: int
    sending_lanes: int
    kept_bytes: int


class Auditor:
    """Joins questions and answers. On the event loop."""

    def __init__(self, post: Callable[[m.Audit], None]) -> None:
        self._post = post
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[m.Audited]] = {}

    async def ask(self) -> m.Audited:
        """Raises `TimeoutError` when the engine makes no turn."""
        number = next(self._numbers)
        answer: asyncio.Future[m.Audited] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._post(m.Audit(number))
        try:
            async with asyncio.timeout(ENGINE_S):
                return await answer
        finally:
            del self._asked[number]

    def answered(self, audited: m.Audited) -> None:
        answer = self._asked.get(audited.number)
        if answer is not None and not answer.done():
            answer.set_result(audited)


def audit_reply(incarnation: str, engine: m.Audited, relay: RelayFacts) -> pb.AuditReply:
    return pb.AuditReply(
        incarnation=incarnation,
        legs=[
            pb.AuditedLeg(
                ref=ref_to_wire(leg.ref),
                router=leg.owner.partition("/")[0],
                phase=leg.phase,
                blocks=leg.blocks,
                pushes=leg.pushes,
            )
            for leg in engine.legs
        ],
        total_blocks=engine.pool.total,
        free_blocks=engine.pool.free,
        cached_idle_blocks=engine.pool.cached_idle,
        in_use_blocks=engine.pool.in_use,
        quarantined_blocks=engine.pool.quarantined,
        holds=engine.holds,
        waiting=engine.waiting,
        running=engine.running,
        shared_blocks=engine.shared,
        problem=engine.problem,
        digests=bytes.fromhex(engine.digests),
        expected=[ref_to_wire(ref) for ref in relay.expected],
        receiving_lanes=relay.receiving_lanes,
        sending_lanes=relay.sending_lanes,
        kept_bytes=relay.kept_bytes,
    )
