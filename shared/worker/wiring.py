"""What the control plane's messages mean to a worker, and what it says, as messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kvrelay.shared.engine import messages as m
from kvrelay.shared.rpc.convert import ref_from_wire, ref_to_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.transfer.protocol import Address
from kvrelay.shared.types import EndReason
from kvrelay.shared.worker.meeting import Meeting
from kvrelay.shared.worker.peers import PeerInfo

OfAttempt: TypeAlias = m.RoomGranted | m.Published | m.Cancel

GONE: Final = "the attempt is not here any more"
_END_TO_WIRE: Final = {
    EndReason.FINISHED: pb.END_FINISHED,
    EndReason.CANCELLED: pb.END_CANCELLED,
    EndReason.FAILED: pb.END_FAILED,
}


def _granted(command: pb.Command) -> m.RoomGranted:
    room = command.room
    return m.RoomGranted(ref_from_wire(room.ref), room.first_missing_token, tuple(room.run_blocks))


OF_ATTEMPT: Final[dict[str, Callable[[pb.Command], OfAttempt]]] = {
    "room": _granted,
    "published": lambda command: m.Published(ref_from_wire(command.published)),
    "cancel": lambda command: m.Cancel(ref_from_wire(command.cancel)),
}
"""Commands about an attempt that was begun before, by kind."""


def gone(event: OfAttempt) -> pb.Event:
    """Room for it is of no use: another attempt is needed. Else its end was wanted anyway."""
    ended = pb.Ended(ref=ref_to_wire(event.ref), reason=pb.END_CANCELLED, message=GONE)
    if isinstance(event, m.RoomGranted):
        ended.reason, ended.retryable = pb.END_FAILED, True
    elif isinstance(event, m.Published):
        ended.reason = pb.END_FINISHED
    return pb.Event(ended=ended)


def ended_to_wire(ended: m.Ended, timeline: pb.Timeline) -> pb.Ended:
    return pb.Ended(
        ref=ref_to_wire(ended.ref),
        reason=_END_TO_WIRE[ended.reason],
        message=ended.message,
        retryable=ended.retryable,
        timeline=timeline,
    )


def met_to_wire(decode: str, found: Meeting) -> pb.Met:
    return pb.Met(
        decode=decode,
        problem=found.problem,
        setup_ns=found.setup_ns,
        round_trip_ns=found.round_trip_ns,
        bytes_per_s=found.bytes_per_s,
        carried_by=found.carried_by,
    )


def peer_from_wire(wire: pb.Peer) -> PeerInfo:
    return PeerInfo(wire.incarnation, Address(wire.scheme, wire.address))
