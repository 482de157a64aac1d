"""Between the wire's messages and ours: one place, so that a field is added once each way."""

from __future__ import annotations

from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import FinishReason, LegRef, LegSpec, SamplingParams

PROTOCOL = 3
"""Raised whenever an old peer would misread a new one; unequal peers refuse each other."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_TIMEOUT_MS = 2000
_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A ping without an answer counts by this one too, whose default is a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Also what the kernel waits for the other host to acknowledge what was sent.
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # For a peer that vanished from a pair at rest while Redis is away: leases and, while requests
    # run, the router's beats find it sooner. Each ping wakes threads of both processes about fifty
    # times, so at rest they would be what it costs.
    ("grpc.keepalive_time_ms", 30_000),
)
CHANNEL_OPTIONS = _COMMON_OPTIONS
"""Of a router's channels."""
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Two programs on one port would each get half of the streams.
    ("grpc.so_reuseport", 0),
)
"""Of a worker's server."""

_FINISH_TO_WIRE = {
    None: pb.FINISH_NONE,
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
}
_FINISH_FROM_WIRE = {wire: finish for finish, wire in _FINISH_TO_WIRE.items()}


def finish_to_wire(finish: FinishReason | None) -> pb.Finish:
    return _FINISH_TO_WIRE[finish]


def finish_from_wire(wire: pb.Finish) -> FinishReason | None:
    return _FINISH_FROM_WIRE[wire]


def ref_to_wire(ref: LegRef) -> pb.Ref:
    return pb.Ref(leg=ref.leg, attempt=ref.attempt, nonce=ref.nonce)


def ref_from_wire(wire: pb.Ref) -> LegRef:
    return LegRef(wire.leg, wire.attempt, wire.nonce)


def leg_to_wire(spec: LegSpec) -> pb.Leg:
    sampling = spec.sampling
    return pb.Leg(
        prompt=spec.prompt,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
        ),
        choice=spec.choice,
        seen=spec.seen,
        eos_token_ids=spec.eos_token_ids,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
    )


def leg_from_wire(leg: str, wire: pb.Leg) -> LegSpec:
    sampling = wire.sampling
    return LegSpec(
        leg=leg,
        prompt=tuple(wire.prompt),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=tuple(sampling.stop_token_ids),
        ),
        choice=wire.choice,
        seen=tuple(wire.seen),
        eos_token_ids=tuple(wire.eos_token_ids),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
    )
