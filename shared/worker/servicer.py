"""gRPC in and out: one stream per router, commands to the node, events of each step back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from kvrelay.shared.rpc.convert import PROTOCOL
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.worker.outbox import Outbox

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]


class Commanded(Protocol):
    """What the servicer needs of the node it serves."""

    @property
    def incarnation(self) -> str: ...
    def attach(self, owner: str, outbox: Outbox) -> None: ...
    def command(self, owner: str, command: pb.Command) -> None: ...
    def detach(self, owner: str) -> None: ...
    async def inspect(self) -> pb.InspectReply: ...
    @property
    def legs(self) -> int: ...
    @property
    def remaining_ms(self) -> Callable[[], int | None]: ...


class WorkerServicer(relay_pb2_grpc.WorkerServicer):
    def __init__(self, node: Commanded, drain: Callable[[float | None], None]) -> None:
        """`drain`: begin to, with at most so many seconds; None for the configured ones."""
        self._node = node
        self._drain = drain
        self._streams = itertools.count()

    def serve(self, node: Commanded) -> None:
        """New streams come to this node: the worker goes on as another incarnation."""
        self._node = node

    async def Attach(self, request_iterator: AsyncIterator[pb.ToWorker], context: Context) -> None:
        """Lives as long as the stream; its end, however it comes, cancels what came by it."""
        node = self._node
        hello = await self._hello(node, context)
        owner = f"{hello.router}/{next(self._streams)}"
        outbox = Outbox()
        node.attach(owner, outbox)
        reader = asyncio.create_task(self._read(node, owner, outbox, context))
        try:
            own_hello = pb.WorkerHello(protocol=PROTOCOL, worker=node.incarnation)
            await context.write(pb.FromWorker(hello=own_hello))
            while (events := await outbox.take()) is not None:
                await context.write(pb.FromWorker(events=pb.Events(events=events)))
        finally:
            reader.cancel()
            node.detach(owner)

    async def _hello(self, node: Commanded, context: Context) -> pb.RouterHello:
        first = await context.read()
        if not isinstance(first, pb.ToWorker) or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with a hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol: the worker speaks {PROTOCOL}, the router {hello.protocol}",
            )
        if hello.worker != node.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation: this is {node.incarnation}, not {hello.worker}",
            )
        return hello

    async def _read(self, node: Commanded, owner: str, outbox: Outbox, context: Context) -> None:
        try:
            while isinstance(message := await context.read(), pb.ToWorker):
                commands = message.commands.commands
                for command in commands:
                    node.command(owner, command)
                if not commands:
                    outbox.beat()
        except (grpc.RpcError, ValueError, KeyError) as error:
            log.warning("stream of router %s ends: %s", owner, error)
        finally:
            outbox.close()

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        return await self._node.inspect()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        node = self._node
        self._drain(request.budget_ms / 1e3 if request.HasField("budget_ms") else None)
        return pb.DrainReply(
            incarnation=node.incarnation, remaining_ms=node.remaining_ms() or 0, legs=node.legs
        )
