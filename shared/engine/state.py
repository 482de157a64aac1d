"""All that an engine knows: its legs, queues and pool. Plain state, changed by two modules.

`scheduler.plan` decides what the next step computes; `Engine` applies events and results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvrelay.shared.intmath import cdiv
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash, extend_hashes
from kvrelay.shared.lifecycle import HOLDING, Phase, check_move
from kvrelay.shared.types import BlockId, EndReason, LegRef, LegSpec


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Fixed for the life of an engine."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    salt: bytes
    """Of the prefix hashes: the fingerprint group."""
    max_chunk_blocks: int = 512
    """Most blocks in one chunk of the relay."""
    watermark_blocks: int = 1
    """Kept free for running legs while new ones are let in; a lone leg may use them."""


@dataclass(slots=True, eq=False)
class Leg:
    """One attempt at one leg, on this worker."""

    owner: str
    ref: LegRef
    spec: LegSpec
    phase: Phase
    handoff: bool = False
    writer: str = ""
    """Incarnation of the prefill worker that fills this leg's blocks (decode side)."""
    known: list[int] = field(default_factory=list)
    """Prompt, then output tokens; `computed` of them have their KV in `blocks`."""
    computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    named_blocks: int = 0
    started: bool = False
    preemptions: int = 0
    # prefill's side of a handoff
    first_missing: int = 0
    run_blocks: tuple[int, ...] = ()
    pushed_tokens: int = 0
    chunks: int = 0
    pushes: int = 0
    """Chunks handed to the relay that have not answered `PushDone`."""
    # decode's side
    received: int = 0
    # set when the leg is over but a transfer still touches its blocks
    end: tuple[EndReason, str, bool] | None = None
    key: str = field(init=False)
    """Of its rows in plans and results."""

    def __post_init__(self) -> None:
        self.key = f"{self.ref.leg}#{self.ref.attempt}"

    @property
    def total(self) -> int:
        return len(self.known)

    @property
    def pending(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.known) - self.computed

    @property
    def outputs(self) -> int:
        """Output tokens known, those seen before this attempt included."""
        return len(self.known) - len(self.spec.prompt)

    def move(self, after: Phase) -> None:
        check_move(self.key, self.phase, after)
        self.phase = after


@dataclass(slots=True)
class EngineState:
    limits: EngineLimits
    pool: BlockPool
    legs: dict[LegRef, Leg] = field(default_factory=dict)
    waiting: deque[Leg] = field(default_factory=deque)
    """WAITING, ASKING and READY legs, oldest first; preempted ones in front."""
    running: list[Leg] = field(default_factory=list)
    """RUNNING legs in order of admission: the last one is preempted first."""
    reserving: deque[Leg] = field(default_factory=deque)
    receiving: int = 0
    step: int = 0
    preemptions: int = 0
    cache_hit_tokens: int = 0
    cache_miss_tokens: int = 0

    def blocks_for(self, tokens: int) -> int:
        return cdiv(tokens, self.limits.block_size)

    def name(self, leg: Leg) -> None:
        """Make the leg's full computed blocks findable as prefixes."""
        full = leg.computed // self.limits.block_size
        if full <= leg.named_blocks:
            return
        self.hash(leg)
        for i in range(leg.named_blocks, full):
            self.pool.register(leg.blocks[i], leg.hashes[i])
        leg.named_blocks = full

    def hash(self, leg: Leg) -> None:
        extend_hashes(leg.hashes, leg.known, self.limits.block_size, self.limits.salt)

    def cached_prefix(self, leg: Leg) -> list[BlockId]:
        """Cached blocks of the leg's longest prefix; one token is always left to compute."""
        self.hash(leg)
        usable = (leg.total - 1) // self.limits.block_size
        return self.pool.lookup(leg.hashes[:usable])

    def check(self) -> None:
        """Assert that pool and legs agree: no block without a live holder (L4)."""
        self.pool.check()
        holders = [leg for leg in self.legs.values() if leg.phase in HOLDING]
        held: dict[BlockId, int] = {}
        for leg in holders:
            for block in leg.blocks:
                held[block] = held.get(block, 0) + 1
        counts = self.pool.counts()
        assert len(held) == counts.in_use + counts.quarantined, "a block has no live holder"
        assert all(not leg.blocks for leg in self.legs.values() if leg.phase not in HOLDING)
        assert all(leg.phase is Phase.RUNNING for leg in self.running)
        assert self.receiving == sum(leg.phase is Phase.RECEIVING for leg in holders)
        assert all(leg.phase is not Phase.ENDED for leg in self.legs.values())
