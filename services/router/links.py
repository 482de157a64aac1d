"""The router's end of the worker streams: one per worker, kept open, everything multiplexed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc

from kvrelay.shared.rpc.convert import CHANNEL_OPTIONS, PROTOCOL
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.rpc.stub import worker_stub
from kvrelay.shared.tasks import TaskSet

log = logging.getLogger(__name__)

RECONNECT_S = 0.3
HELLO_DEADLINE_S = 2.0
BEAT_S = 0.5
"""Time between two beats. Workers count on them: a router that has work on a worker and is silent
for several beats is frozen or cut off."""
UNHEARD_BEATS = 6
"""So many beats without any word from the worker, and it is lost. Where its lease ended it is lost
before that; this is for a Redis that is away."""

Call = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]
OnEvent = Callable[[str, pb.Event], None]
OnLost = Callable[[str], None]
OnOpen = Callable[[str], Awaitable[None]]


def keep_library() -> None:
    """Keep gRPC until the process ends; called once, on the event loop.

    Otherwise whoever drops the last channel shuts gRPC down from its destructor: there and then, be
    it on the event loop or in another thread's garbage collection, it takes the loop's reader away
    and joins gRPC's threads. A router whose workers are all gone, or that ends, could stand still
    by that.
    """
    grpc.aio.init_grpc_aio()


async def at_once(incarnation: str) -> None:
    """Nothing is to be prepared."""


class CommandSink(Protocol):
    """Where a worker's commands go."""

    @property
    def open(self) -> bool: ...
    def send(self, command: pb.Command) -> None: ...


class Link:
    """To one start of one worker. While it is `open`, commands reach the worker in order.

    `prepare` is awaited each time before it opens. When the stream breaks, `on_lost` is called
    once, and the link tries again until it is closed: the worker may be there still (a reset
    connection), or its lease ends and the link is closed.

    A worker that is silent although it is asked, while `needed` says that something waits for it,
    counts as a broken stream: with Redis away no lease tells of one that is frozen or cut off.
    """

    def __init__(
        self, incarnation: str, address: str, router: str, on_event: OnEvent, on_lost: OnLost
    ) -> None:
        self.incarnation = incarnation
        self.open = False
        self._address = address
        self._router = router
        self._on_event = on_event
        self._on_lost = on_lost
        self.prepare: OnOpen = at_once
        self.opened: OnLost = lambda incarnation: None
        """Called each time it has opened."""
        self.needed: Callable[[], bool] = lambda: True
        self.tried = asyncio.Event()
        """It has been open, or could not be opened at once."""
        self._commands: list[pb.Command] = []
        self._filled = asyncio.Event()
        self._used = asyncio.Event()
        self._beat = False
        """Due to be sent."""
        self._heard = False
        """Anything, since the last beat."""
        self._tasks = TaskSet()
        self._tasks.spawn(self._run())

    def send(self, command: pb.Command) -> None:
        """Queue a command; dropped when the stream is down, for then the worker drops all too."""
        if self.open:
            self._commands.append(command)
            self._filled.set()
            self._used.set()

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._stream()
                except (grpc.RpcError, TimeoutError, ConnectionError) as error:
                    log.info("stream to worker %s: %s", self.incarnation, reason(error))
                except asyncio.CancelledError:
                    # gRPC also says this when the other end cancelled the stream.
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    log.info("stream to worker %s: cancelled by the worker", self.incarnation)
                except Exception:
                    log.exception(
                        "stream to worker %s: an event could not be handled", self.incarnation
                    )
                self._down()
                await asyncio.sleep(RECONNECT_S)  # paced: a worker that is gone is tried 3 times/s
        finally:
            self._down()

    def _down(self) -> None:
        self.tried.set()
        was_open, self.open = self.open, False
        self._commands.clear()
        if was_open:
            self._on_lost(self.incarnation)

    async def _stream(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            call = worker_stub(channel).Attach()
            async with asyncio.timeout(HELLO_DEADLINE_S):
                await call.write(self._hello())
                first = await call.read()
            if not isinstance(first, pb.FromWorker) or first.WhichOneof("kind") != "hello":
                return
            await self.prepare(self.incarnation)
            self.open = True
            self.tried.set()
            log.info("stream to worker %s is open", self.incarnation)
            self.opened(self.incarnation)
            reader, watch = (
                asyncio.create_task(self._read(call)),
                asyncio.create_task(self._watch()),
            )
            tasks = (reader, watch, asyncio.create_task(self._write(call)))
            try:
                await asyncio.wait((reader, watch), return_when=asyncio.FIRST_COMPLETED)
                for task in (watch, reader):
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Call) -> None:
        while isinstance(message := await call.read(), pb.FromWorker):
            self._heard = True
            for event in message.events.events:
                self._on_event(self.incarnation, event)

    async def _write(self, call: Call) -> None:
        """What is queued, all of it in one message; a broken stream ends the reader, too."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            commands, self._commands = self._commands, []
            if commands:
                await call.write(pb.ToWorker(commands=pb.Commands(commands=commands)))
            if self._beat:
                self._beat = False
                await call.write(pb.ToWorker(commands=pb.Commands()))

    async def _watch(self) -> None:
        """Beats from the first command on until nothing is needed; asleep at rest.

        Raises `TimeoutError` when nothing was heard since a beat.
        """
        while True:
            await self._used.wait()
            self._used.clear()
            unheard = 0
            while self.needed():
                self._beat, self._heard = True, False
                self._filled.set()
                await asyncio.sleep(BEAT_S)
                unheard = 0 if self._heard else unheard + 1
                # One more than were due: this process may have stood still itself, and the
                # answers wait unread.
                if unheard > UNHEARD_BEATS:
                    raise TimeoutError(f"silent for {unheard * BEAT_S:g} s")

    def _hello(self) -> pb.ToWorker:
        return pb.ToWorker(
            hello=pb.RouterHello(
                protocol=PROTOCOL,
                router=self._router,
                worker=self.incarnation,
                beat_ms=round(BEAT_S * 1000),
            )
        )


def reason(error: Exception) -> str:
    """One line for people."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
