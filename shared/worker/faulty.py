"""A worker's outbox with the faults of a chaos plan between it and the router."""

from __future__ import annotations

from kvrelay.shared.chaos.channel import FaultyChannel
from kvrelay.shared.chaos.decide import Chaos
from kvrelay.shared.chaos.plan import Step
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.worker.outbox import Outbox

_STEPS = {
    "need_room": Step.NEED_ROOM,
    "room": Step.ROOM_GIVEN,
    "started": Step.STARTED,
    "token": Step.TOKEN,
    "published": Step.PUBLISHED_OUT,
    "ended": Step.ENDED,
    "draining": Step.DRAINING,
    "met": Step.MET,
}


def event_step(event: pb.Event) -> Step | None:
    return _STEPS.get(event.WhichOneof("kind") or "")


class FaultyOutbox(Outbox):
    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._channel = FaultyChannel[pb.Event](chaos, event_step, super().put)

    def put(self, event: pb.Event) -> None:
        self._channel.put(event)
