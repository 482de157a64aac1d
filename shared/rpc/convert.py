"""Between the wire's messages and ours: one place, so that a field is added once each way."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.telemetry.spans import Piece
from kvrelay.shared.types import FinishReason, LegRef, LegSpec, Logprobs, SamplingParams

PROTOCOL = 5
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


def sampling_to_wire(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        biased_token_ids=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[pb.BadWord(token_ids=word) for word in sampling.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
    )


def sampling_from_wire(wire: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(wire.stop_token_ids),
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=tuple(zip(wire.biased_token_ids, wire.biases, strict=True)),
        allowed_token_ids=tuple(wire.allowed_token_ids),
        bad_words=tuple([tuple(word.token_ids) for word in wire.bad_words]),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        grammar=wire.grammar,
    )


def timeline_to_wire(pieces: Sequence[Piece], now_ns: int) -> pb.Timeline:
    wire = [
        pb.Piece(
            name=piece.name,
            start_ns=piece.start_ns,
            end_ns=piece.end_ns,
            parent=piece.parent,
            tokens=piece.tokens,
        )
        for piece in pieces
    ]
    return pb.Timeline(now_ns=now_ns, pieces=wire)


def timeline_from_wire(wire: pb.Timeline) -> tuple[Piece, ...]:
    return tuple(
        Piece(piece.name, piece.start_ns, piece.end_ns, piece.parent, piece.tokens)
        for piece in wire.pieces
    )


def logprobs_to_wire(each: Sequence[Logprobs]) -> pb.Logprobs:
    """All of them have as many tops."""
    tops = [top for one in each for top in one.top]
    return pb.Logprobs(
        chosen=[one.chosen for one in each],
        ranks=[one.rank for one in each],
        tops=len(each[0].top) if each else 0,
        top_token_ids=[token for token, _ in tops],
        top_logprobs=[logprob for _, logprob in tops],
    )


def logprobs_from_wire(wire: pb.Logprobs) -> tuple[Logprobs, ...]:
    tops = list(zip(wire.top_token_ids, wire.top_logprobs, strict=True))
    count = wire.tops
    return tuple(
        [
            Logprobs(chosen, rank, tuple(tops[at * count : (at + 1) * count]))
            for at, (chosen, rank) in enumerate(zip(wire.chosen, wire.ranks, strict=True))
        ]
    )


def leg_to_wire(spec: LegSpec) -> pb.Leg:
    return pb.Leg(
        prompt=spec.prompt,
        sampling=sampling_to_wire(spec.sampling),
        choice=spec.choice,
        seen=spec.seen,
        eos_token_ids=spec.eos_token_ids,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
    )


def leg_from_wire(leg: str, wire: pb.Leg) -> LegSpec:
    return LegSpec(
        leg=leg,
        prompt=tuple(wire.prompt),
        sampling=sampling_from_wire(wire.sampling),
        choice=wire.choice,
        seen=tuple(wire.seen),
        eos_token_ids=tuple(wire.eos_token_ids),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
    )
