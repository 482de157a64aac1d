"""The router's streams with the faults of a chaos plan in them."""

from __future__ import annotations

from kvrelay.services.router.available import Roster
from kvrelay.services.router.links import CommandSink
from kvrelay.services.router.policy import LiveWorker
from kvrelay.shared.chaos.channel import FaultyChannel
from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.chaos.plan import Step
from kvrelay.shared.rpc.gen import relay_pb2 as pb

_STEPS = {
    "serve": Step.SERVE,
    "reserve": Step.RESERVE,
    "room": Step.ROOM,
    "published": Step.PUBLISHED,
    "cancel": Step.CANCEL,
}


def command_step(command: pb.Command) -> Step | None:
    return _STEPS.get(command.WhichOneof("kind") or "")


class FaultySink:
    """One worker's stream. What is late when the stream breaks is dropped with it."""

    def __init__(self, inner: CommandSink, chaos: Chaos) -> None:
        self.inner = inner
        self._channel = FaultyChannel(chaos, command_step, inner.send)

    @property
    def open(self) -> bool:
        return self.inner.open

    def send(self, command: pb.Command) -> None:
        self._channel.put(command)


class FaultyRoster:
    """A roster whose workers are reached through `FaultySink`s."""

    def __init__(self, inner: Roster, chaos: Chaos) -> None:
        self._inner = inner
        self._chaos = chaos
        self._sinks: dict[str, FaultySink] = {}

    def live(self) -> list[LiveWorker]:
        return self._inner.live()

    def link(self, incarnation: str) -> CommandSink | None:
        link = self._inner.link(incarnation)
        if link is None:
            self._sinks.pop(incarnation, None)
            return None
        sink = self._sinks.get(incarnation)
        if sink is None or sink.inner is not link:
            sink = self._sinks[incarnation] = FaultySink(link, self._chaos)
        return sink

    async def wait_change(self) -> None:
        await self._inner.wait_change()

    def look(self) -> None:
        self._inner.look()
