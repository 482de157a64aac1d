"""The closed sets of label values: nothing a client sends can make a new series."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


class Outcome(StrEnum):
    """How a request ended: one per request."""

    OK = "ok"
    CANCELLED = "cancelled"
    BAD_REQUEST = "bad_request"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    CONFLICT = "token_conflict"
    FAILED = "failed"


class LegEnd(StrEnum):
    """How a leg ended for the router, or an attempt at it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REPLACED = "replaced"
    """By another attempt."""


class AttemptCause(StrEnum):
    """Why an attempt was begun; everything but `first` replaced a half that was lost."""

    FIRST = "first"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    TRANSFER_FAULT = "transfer_fault"
    PREEMPTED = "preempted"
    DRAIN = "drain"


class RouteKind(StrEnum):
    """How a leg is served."""

    SPLIT = "split"
    LOCAL = "local"


class RouteReason(StrEnum):
    """What decided which workers serve a leg: the first of these that holds."""

    NO_ROOM = "no_room"
    """Nobody has memory for it now: who will have some first."""
    HELD = "held"
    """Blocks of the prompt lie at the one who computes it."""
    UNMEASURED = "unmeasured"
    """No rates are known yet: who got least."""
    PREDICTED = "predicted"
    """By measured rates the first token is soonest there, at the least harm to others."""


class StageKind(StrEnum):
    """Where a leg is, as its router sees it."""

    CHOOSING = "choosing"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"


class WorkerState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class LedgerResult(StrEnum):
    """What became of an event for the ledger."""

    WRITTEN = "written"
    CONFLICT = "conflict"
    """Not a move forward, or another router's request."""
    DROPPED = "dropped"
    """For want of room, while Redis was away."""


class TokenKind(StrEnum):
    PROMPT = "prompt"
    OUTPUT = "output"


class UsageKind(StrEnum):
    PROMPT = "prompt"
    CACHED = "cached"
    """Of the prompts' tokens those that nobody had to compute."""
    COMPLETION = "completion"


class CacheResult(StrEnum):
    HIT = "hit"
    MISS = "miss"


class Direction(StrEnum):
    SENT = "sent"
    RECEIVED = "received"


class TransferFault(StrEnum):
    PEER_LOST = "peer_lost"
    CORRUPT = "corrupt"
    STALE = "stale"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    """A chunk that had come already."""
    GAP = "gap"
    """A chunk before its turn: one before it was lost or is late."""
