"""What goes into an engine and what comes out: plain data, no IO.

`owner` is the router stream that a leg came by; everything about the leg goes back to it, and the
end of the stream ends the leg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.shared.kv.pool import PoolCounts
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.types import BlockId, EndReason, FinishReason, LegRef, LegSpec, Logprobs

# ---- in: from routers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serve:
    """Compute this leg; with `handoff`, only to its first new token, relayed to a peer."""

    owner: str
    ref: LegRef
    spec: LegSpec
    handoff: bool
    reader: str = ""
    """With `handoff`: incarnation of the decode worker that is asked for room."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room for a leg whose KV `writer` will relay."""

    owner: str
    ref: LegRef
    spec: LegSpec
    writer: str
    """Incarnation of the prefill worker: the only one whose chunks are accepted."""


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """Decode's answer, passed on by the router to prefill."""

    ref: LegRef
    first_missing: int
    """Tokens before this position are already at decode; a multiple of the block size."""
    run_blocks: tuple[int, ...]
    """Lengths of the runs of adjacent blocks at decode, from `first_missing` on."""


@dataclass(frozen=True, slots=True)
class Published:
    """Decode has it all, says the router to prefill: the blocks may be unpinned."""

    ref: LegRef


@dataclass(frozen=True, slots=True)
class Cancel:
    """The attempt is over for the router (client gone, stop string, deadline, replaced)."""

    ref: LegRef


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """A router's stream ended: everything it started here is cancelled."""

    owner: str


# ---- in: from its own worker ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """So much time has passed: attempts that hear nothing for too long are ended."""

    passed_ms: int


# ---- in: from people --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """Say what is held here; `Audited` with the same number answers."""

    number: int


# ---- in: from the relay -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushDone:
    """One chunk has left, or never will (`error`); its blocks are no longer read for it."""

    ref: LegRef
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk of the right writer, in range, with the right checksum, lies in quarantine."""

    ref: LegRef
    start: int
    end: int
    last: bool
    token: int = -1
    """With `last`: the token that prefill sampled."""


@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The incoming transfer of this attempt cannot be completed."""

    ref: LegRef
    error: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nothing writes into the blocks of this attempt any more, and nothing ever will."""

    ref: LegRef


Event: TypeAlias = (
    Serve
    | Reserve
    | RoomGranted
    | Published
    | Cancel
    | OwnerGone
    | Look
    | Audit
    | PushDone
    | ChunkArrived
    | RelayFailed
    | Forgotten
)

# ---- out: to the router that owns the leg -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeedRoom:
    owner: str
    ref: LegRef


@dataclass(frozen=True, slots=True)
class Room:
    owner: str
    ref: LegRef
    first_missing: int
    run_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The leg is in a step for the first time here; `cached` of its tokens needed no computing."""

    owner: str
    ref: LegRef
    cached: int


@dataclass(slots=True)  # not frozen, and so made in a fifth of the time: one a row and step
class TokenOut:
    owner: str
    ref: LegRef
    index: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """With token 0, by whoever computed the prompt: of its tokens 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class PublishedOut:
    owner: str
    ref: LegRef
    tokens: int
    """How many tokens' KV were relayed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event of an attempt on this worker: it holds nothing here any more."""

    owner: str
    ref: LegRef
    reason: EndReason
    message: str = ""
    retryable: bool = False


# ---- out: to people ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditedLeg:
    ref: LegRef
    owner: str
    phase: Phase
    blocks: int
    pushes: int
    """Chunks of it that the relay has."""


@dataclass(frozen=True, slots=True)
class Audited:
    """All that is held here at one instant between two steps."""

    number: int
    legs: tuple[AuditedLeg, ...]
    pool: PoolCounts
    holds: int
    """Sum of the holders of all blocks."""
    waiting: int
    running: int
    shared: int
    """Blocks on their way that others may wait for."""
    problem: str
    """What pool and legs do not agree on; empty when they do."""
    digests: str
    """Of all full prefix blocks, in hex, 32 digits each and sorted."""


# ---- out: to the relay ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Push:
    """Send these blocks: tokens [start, end) of the attempt, chunk number `chunk`."""

    ref: LegRef
    chunk: int
    start: int
    end: int
    blocks: tuple[BlockId, ...]
    run_blocks: tuple[int, ...]
    """The receiver's runs over the same blocks."""
    last: bool
    token: int = -1
    index: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """Send no more chunks of this attempt; each queued one still answers `PushDone`."""

    ref: LegRef


@dataclass(frozen=True, slots=True)
class Expect:
    """Accept chunks of this attempt into these quarantined blocks."""

    ref: LegRef
    writer: str
    first_missing: int
    total: int
    block_size: int
    blocks: tuple[BlockId, ...]
    """Block i takes tokens from `first_missing + i * block_size` on."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Accept no more chunks of this attempt; answer `Forgotten` when nothing writes any more."""

    ref: LegRef


Instruction: TypeAlias = (
    NeedRoom
    | Room
    | Started
    | TokenOut
    | PublishedOut
    | Ended
    | Audited
    | Push
    | Abandon
    | Expect
    | Forget
)
