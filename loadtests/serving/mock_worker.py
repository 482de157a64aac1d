"""A worker that computes nothing: the real protocol, and tokens whenever somebody gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kvrelay.shared.clock import SystemClock
from kvrelay.shared.rpc.convert import SERVER_OPTIONS
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.presence import Presence, Subject
from kvrelay.shared.store.records import FINGERPRINT_FIELDS, LoadRecord, WorkerRecord
from kvrelay.shared.types import Incarnation, Role
from kvrelay.shared.worker.outbox import Outbox
from kvrelay.shared.worker.servicer import WorkerServicer

WORKER = Incarnation("0" * 32)
CONTEXT_TOKENS = 1 << 20


@dataclass(slots=True, eq=False)
class Leg:
    """One stream, at both of its ends."""

    ref: pb.Ref
    owner: str
    outbox: Outbox
    left_ns: list[int] = field(default_factory=list)
    """When each token left the worker."""
    came_ns: list[int] = field(default_factory=list)
    """When each was read."""


class Worker:
    """`Commanded` without an engine."""

    incarnation: str = WORKER
    serving = True

    def __init__(self, token: int) -> None:
        self._token = token
        self._outboxes: dict[str, Outbox] = {}
        self.running: dict[str, Leg] = {}
        self.changed = asyncio.Event()

    @property
    def legs(self) -> int:
        return len(self.running)

    @property
    def remaining_ms(self) -> Callable[[], int | None]:
        return lambda: None

    def attach(self, owner: str, outbox: Outbox) -> None:
        self._outboxes[owner] = outbox

    def detach(self, owner: str) -> None:
        del self._outboxes[owner]
        self.running = {name: leg for name, leg in self.running.items() if leg.owner != owner}

    def works_for(self, owner: str) -> bool:
        return any(leg.owner == owner for leg in self.running.values())

    def legs_of(self, router: str) -> list[str]:
        return [*self.running]

    def command(self, owner: str, command: pb.Command) -> None:
        outbox = self._outboxes[owner]
        kind = command.WhichOneof("kind")
        if kind == "serve":
            ref = command.serve.ref
            self.running[ref.leg] = Leg(ref, owner, outbox)
            outbox.put(pb.Event(started=pb.Started(ref=ref)))
        elif kind == "cancel" and self.running.pop(command.cancel.leg, None) is not None:
            outbox.put(pb.Event(ended=pb.Ended(ref=command.cancel, reason=pb.END_CANCELLED)))
        self.changed.set()

    def give(self, leg: Leg) -> None:
        """The next token."""
        index = len(leg.left_ns)
        leg.outbox.put(pb.Event(token=pb.Token(ref=leg.ref, index=index, token=self._token)))
        leg.left_ns.append(time.monotonic_ns())

    async def inspect(self) -> pb.InspectReply:
        return pb.InspectReply(incarnation=self.incarnation, healthy=True, legs=self.legs)

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        raise ValueError("there is nothing to relay")

    async def audit(self) -> pb.AuditReply:
        return pb.AuditReply(incarnation=self.incarnation)


@asynccontextmanager
async def registered(redis_url: str, worker: Worker, tokenizer: str) -> AsyncIterator[None]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    servicer = WorkerServicer(worker, lambda seconds: None)
    relay_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = WorkerRecord(
        incarnation=WORKER,
        role=Role.BOTH,
        name="both-0",
        model="none",
        grpc_address=f"127.0.0.1:{port}",
        metrics_address="",
        transfer_scheme="none",
        transfer_address=b"none",
        fingerprint={name: "none" for name in FINGERPRINT_FIELDS} | {"tokenizer": tokenizer},
        block_size=16,
        pool_blocks=1 << 20,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=1 << 16,
    )
    load = LoadRecord(0, 0, 0, 1 << 20, 1 << 20, 1e4, 1e4)
    subject = Subject(record, lambda: record, load=lambda: load)
    presence = Presence(redis_url, Keys("kvrelay"), subject, SystemClock())
    presence.start()
    try:
        yield
    finally:
        await asyncio.to_thread(presence.stop)
        await server.stop(0)
