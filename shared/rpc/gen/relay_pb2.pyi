from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_FINISHED: _ClassVar[End]
    END_CANCELLED: _ClassVar[End]
    END_FAILED: _ClassVar[End]
FINISH_NONE: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
END_FINISHED: End
END_CANCELLED: End
END_FAILED: End

class Ref(_message.Message):
    __slots__ = ("leg", "attempt", "nonce")
    LEG_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    leg: str
    attempt: int
    nonce: int
    def __init__(self, leg: _Optional[str] = ..., attempt: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "biased_token_ids", "biases", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIASED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    biased_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    logprobs: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., biased_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Leg(_message.Message):
    __slots__ = ("prompt", "sampling", "choice", "seen", "eos_token_ids", "priority", "cache_salt")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    choice: int
    seen: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    cache_salt: str
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., choice: _Optional[int] = ..., seen: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("incarnation", "scheme", "address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    scheme: str
    address: bytes
    def __init__(self, incarnation: _Optional[str] = ..., scheme: _Optional[str] = ..., address: _Optional[bytes] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol", "router", "worker", "beat_ms")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BEAT_MS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    router: str
    worker: str
    beat_ms: int
    def __init__(self, protocol: _Optional[int] = ..., router: _Optional[str] = ..., worker: _Optional[str] = ..., beat_ms: _Optional[int] = ...) -> None: ...

class Serve(_message.Message):
    __slots__ = ("ref", "leg", "decode", "traceparent")
    REF_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    leg: Leg
    decode: Peer
    traceparent: str
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., leg: _Optional[_Union[Leg, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("ref", "leg", "prefill", "traceparent")
    REF_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    leg: Leg
    prefill: Peer
    traceparent: str
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., leg: _Optional[_Union[Leg, _Mapping]] = ..., prefill: _Optional[_Union[Peer, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Room(_message.Message):
    __slots__ = ("ref", "first_missing_token", "run_blocks")
    REF_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    first_missing_token: int
    run_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., first_missing_token: _Optional[int] = ..., run_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("serve", "reserve", "room", "published", "cancel", "meet", "gone")
    SERVE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    serve: Serve
    reserve: Reserve
    room: Room
    published: Ref
    cancel: Ref
    meet: Meet
    gone: str
    def __init__(self, serve: _Optional[_Union[Serve, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., published: _Optional[_Union[Ref, _Mapping]] = ..., cancel: _Optional[_Union[Ref, _Mapping]] = ..., meet: _Optional[_Union[Meet, _Mapping]] = ..., gone: _Optional[str] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("hello", "commands")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    commands: Commands
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., commands: _Optional[_Union[Commands, _Mapping]] = ...) -> None: ...

class Commands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol", "worker")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "ranks", "tops", "top_token_ids", "top_logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOPS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    tops: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., tops: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("ref", "index", "token", "finish", "logprobs", "prompt_logprobs")
    REF_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    index: int
    token: int
    finish: Finish
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("ref", "cached_tokens")
    REF_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    cached_tokens: int
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("ref", "relayed_tokens")
    REF_FIELD_NUMBER: _ClassVar[int]
    RELAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    relayed_tokens: int
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., relayed_tokens: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("ref", "reason", "message", "retryable", "timeline")
    REF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    reason: End
    message: str
    retryable: bool
    timeline: Timeline
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., reason: _Optional[_Union[End, str]] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("now_ns", "pieces")
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, now_ns: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("name", "start_ns", "end_ns", "parent", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_ns: int
    end_ns: int
    parent: int
    tokens: int
    def __init__(self, name: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., parent: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("remaining_ms",)
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    remaining_ms: int
    def __init__(self, remaining_ms: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("need_room", "room", "started", "token", "published", "ended", "draining", "met")
    NEED_ROOM_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    need_room: Ref
    room: Room
    started: Started
    token: Token
    published: Published
    ended: Ended
    draining: Draining
    met: Met
    def __init__(self, need_room: _Optional[_Union[Ref, _Mapping]] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., met: _Optional[_Union[Met, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("hello", "events")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    events: Events
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., events: _Optional[_Union[Events, _Mapping]] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("incarnation", "total_blocks", "free_blocks", "cached_idle_blocks", "in_use_blocks", "quarantined_blocks", "waiting", "running", "holders", "healthy", "legs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    total_blocks: int
    free_blocks: int
    cached_idle_blocks: int
    in_use_blocks: int
    quarantined_blocks: int
    waiting: int
    running: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    healthy: bool
    legs: int
    def __init__(self, incarnation: _Optional[str] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_idle_blocks: _Optional[int] = ..., in_use_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., healthy: _Optional[bool] = ..., legs: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("budget_ms",)
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    budget_ms: int
    def __init__(self, budget_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("incarnation", "remaining_ms", "legs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    remaining_ms: int
    legs: int
    def __init__(self, incarnation: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., legs: _Optional[int] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("incarnation", "attached", "legs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    attached: bool
    legs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[str] = ..., attached: _Optional[bool] = ..., legs: _Optional[_Iterable[str]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditedLeg(_message.Message):
    __slots__ = ("ref", "router", "phase", "blocks", "pushes")
    REF_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    ref: Ref
    router: str
    phase: str
    blocks: int
    pushes: int
    def __init__(self, ref: _Optional[_Union[Ref, _Mapping]] = ..., router: _Optional[str] = ..., phase: _Optional[str] = ..., blocks: _Optional[int] = ..., pushes: _Optional[int] = ...) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("incarnation", "legs", "total_blocks", "free_blocks", "cached_idle_blocks", "in_use_blocks", "quarantined_blocks", "holds", "waiting", "running", "shared_blocks", "problem", "digests", "expected", "receiving_lanes", "sending_lanes", "kept_bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_LANES_FIELD_NUMBER: _ClassVar[int]
    SENDING_LANES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    legs: _containers.RepeatedCompositeFieldContainer[AuditedLeg]
    total_blocks: int
    free_blocks: int
    cached_idle_blocks: int
    in_use_blocks: int
    quarantined_blocks: int
    holds: int
    waiting: int
    running: int
    shared_blocks: int
    problem: str
    digests: bytes
    expected: _containers.RepeatedCompositeFieldContainer[Ref]
    receiving_lanes: int
    sending_lanes: int
    kept_bytes: int
    def __init__(self, incarnation: _Optional[str] = ..., legs: _Optional[_Iterable[_Union[AuditedLeg, _Mapping]]] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_idle_blocks: _Optional[int] = ..., in_use_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., holds: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., problem: _Optional[str] = ..., digests: _Optional[bytes] = ..., expected: _Optional[_Iterable[_Union[Ref, _Mapping]]] = ..., receiving_lanes: _Optional[int] = ..., sending_lanes: _Optional[int] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ("decodes", "prefills")
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    decodes: _containers.RepeatedCompositeFieldContainer[Peer]
    prefills: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, decodes: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., prefills: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Met(_message.Message):
    __slots__ = ("decode", "problem", "setup_ns", "round_trip_ns", "bytes_per_s", "carried_by")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SETUP_NS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BY_FIELD_NUMBER: _ClassVar[int]
    decode: str
    problem: str
    setup_ns: int
    round_trip_ns: int
    bytes_per_s: float
    carried_by: str
    def __init__(self, decode: _Optional[str] = ..., problem: _Optional[str] = ..., setup_ns: _Optional[int] = ..., round_trip_ns: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., carried_by: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("decode", "prefill", "body_bytes", "rounds")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    decode: Peer
    prefill: Peer
    body_bytes: int
    rounds: int
    def __init__(self, decode: _Optional[_Union[Peer, _Mapping]] = ..., prefill: _Optional[_Union[Peer, _Mapping]] = ..., body_bytes: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("incarnation", "wall_ns", "transport", "lane")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    wall_ns: int
    transport: str
    lane: Met
    def __init__(self, incarnation: _Optional[str] = ..., wall_ns: _Optional[int] = ..., transport: _Optional[str] = ..., lane: _Optional[_Union[Met, _Mapping]] = ...) -> None: ...
