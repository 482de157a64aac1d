"""gRPC in and out: one stream per router, commands to the node, events of each step back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from kvrelay.shared.clock import Clock, SystemClock
from kvrelay.shared.errors import Overloaded
from kvrelay.shared.rpc.convert import PROTOCOL
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.gen import relay_pb2_grpc
from kvrelay.shared.worker.audit import ENGINE_S
from kvrelay.shared.worker.health import SilenceWatch
from kvrelay.shared.worker.outbox import Outbox

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]


class Commanded(Protocol):
    """What the servicer needs of the node it serves."""

    @property
    def incarnation(self) -> str: ...
    @property
    def serving(self) -> bool: ...
    def attach(self, owner: str, outbox: Outbox) -> None: ...
    def command(self, owner: str, command: pb.Command) -> None: ...
    def detach(self, owner: str) -> None: ...
    def works_for(self, owner: str) -> bool: ...
    def legs_of(self, router: str) -> list[str]: ...
    async def inspect(self) -> pb.InspectReply: ...
    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply: ...
    async def audit(self) -> pb.AuditReply: ...
    @property
    def legs(self) -> int: ...
    @property
    def remaining_ms(self) -> Callable[[], int | None]: ...


class _Stream:
    """One router's, from hello to end."""

    def __init__(self, router: str, owner: str, silence: SilenceWatch, outbox: Outbox) -> None:
        self.router = router
        self.owner = owner
        self.silence = silence
        self.outbox = outbox
        self.commanded = asyncio.Event()


class WorkerServicer(relay_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        node: Commanded,
        drain: Callable[[float | None], None],
        clock: Clock | None = None,
        outbox: Callable[[], Outbox] = Outbox,
    ) -> None:
        """`drain`: begin to, with at most so many seconds; None for the configured ones."""
        self._node = node
        self._drain = drain
        self._outbox = outbox
        self._clock = clock or SystemClock()
        self._numbers = itertools.count()
        self._streams: set[_Stream] = set()

    def serve(self, node: Commanded) -> None:
        """New streams come to this node: the worker goes on as another incarnation."""
        self._node = node

    async def Attach(self, request_iterator: AsyncIterator[pb.ToWorker], context: Context) -> None:
        """Lives as long as the stream; its end, however it comes, cancels what came by it.

        A router that is silent may be one that reads nothing either: what is being written to it
        is not waited for.
        """
        node = self._node
        hello = await self._hello(node, context)
        if not node.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine makes no progress")
        owner = f"{hello.router}/{next(self._numbers)}"
        silence = SilenceWatch(hello.beat_ms * 1_000_000, self._clock.now_ns())
        stream = _Stream(hello.router, owner, silence, self._outbox())
        self._streams.add(stream)
        node.attach(owner, stream.outbox)
        reader = asyncio.create_task(self._read(node, stream, context))
        writer = asyncio.create_task(self._write(node, stream, context))
        watch = asyncio.create_task(self._watch(node, stream))
        try:
            await asyncio.wait((writer, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(stream)
            node.detach(owner)
            for task in (reader, writer, watch):
                task.cancel()
            ends = await asyncio.gather(writer, watch, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if ends[1] is True:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router was silent")

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

    async def _write(self, node: Commanded, stream: _Stream, context: Context) -> None:
        own_hello = pb.WorkerHello(protocol=PROTOCOL, worker=node.incarnation)
        await context.write(pb.FromWorker(hello=own_hello))
        while (events := await stream.outbox.take()) is not None:
            await context.write(pb.FromWorker(events=pb.Events(events=events)))

    async def _read(self, node: Commanded, stream: _Stream, context: Context) -> None:
        try:
            while isinstance(message := await context.read(), pb.ToWorker):
                stream.silence.heard(self._clock.now_ns())
                commands = message.commands.commands
                for command in commands:
                    node.command(stream.owner, command)
                if commands:
                    stream.commanded.set()
                else:
                    stream.outbox.beat()
        except (grpc.RpcError, ValueError, KeyError) as error:
            log.warning("stream of router %s ends: %s", stream.owner, error)
        finally:
            stream.outbox.close()

    async def _watch(self, node: Commanded, stream: _Stream) -> bool:
        """Until the router is silent while it has work here; asleep while it has none."""
        silence = stream.silence
        while True:
            await stream.commanded.wait()
            stream.commanded.clear()
            if silence.tick_ns == 0:
                continue
            silence.begin(self._clock.now_ns())
            while node.works_for(stream.owner):
                await asyncio.sleep(silence.tick_ns / 1e9)
                if silence.silent(self._clock.now_ns()):
                    log.warning(
                        "router %s was silent for %.1f s: all it has here is cancelled",
                        stream.owner,
                        silence.limit_ns / 1e9,
                    )
                    return True

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        return await self._node.inspect()

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditReply:
        try:
            return await self._node.audit()
        except TimeoutError:
            problem = f"the engine made no turn within {ENGINE_S:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, problem)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        node = self._node
        self._drain(request.budget_ms / 1e3 if request.HasField("budget_ms") else None)
        return pb.DrainReply(
            incarnation=node.incarnation, remaining_ms=node.remaining_ms() or 0, legs=node.legs
        )

    async def Held(self, request: pb.HeldRequest, context: Context) -> pb.HeldReply:
        node, now_ns = self._node, self._clock.now_ns()
        streams = [stream for stream in self._streams if stream.router == request.router]
        return pb.HeldReply(
            incarnation=node.incarnation,
            attached=any(stream.silence.here(now_ns) for stream in streams),
            legs=node.legs_of(request.router),
        )

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeReply:
        try:
            return await self._node.probe(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Overloaded as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
