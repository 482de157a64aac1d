"""All that an engine knows: its legs, queues and pool. Plain state, changed by two modules.

`scheduler.plan` decides what the next step computes; `Engine` applies events and results.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay.shared.engine.inflight import Inflight
from kvrelay.shared.engine.plan import Plan
from kvrelay.shared.engine.policy import Arrival, Policy, fcfs
from kvrelay.shared.engine.queue import LAST, LegQueue, Rank
from kvrelay.shared.engine.steering import Steering
from kvrelay.shared.intmath import cdiv
from kvrelay.shared.kv.index import Name
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes
from kvrelay.shared.lifecycle import HOLDING, QUEUED, Phase, check_move
from kvrelay.shared.types import BlockId, EndReason, LegRef, LegSpec, Logprobs


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
    """Kept free for running legs, besides some for each of them, while new ones are let in."""
    even_context: int = 0
    """So many tokens before a token are as much work as the rest of computing it: what bounds a
    step counts them. 0 counts tokens alone."""
    policy: Policy = fcfs


@dataclass(slots=True, eq=False)
class Leg:
    """One attempt at one leg, on this worker."""

    owner: str
    ref: LegRef
    spec: LegSpec
    phase: Phase
    handoff: bool = False
    reader: str = ""
    """Incarnation of the decode worker that takes this leg's blocks (prefill side)."""
    writer: str = ""
    """Incarnation of the prefill worker that fills this leg's blocks (decode side)."""
    known: list[int] = field(default_factory=list)
    """Prompt, then output tokens; `computed` of them have their KV in `blocks`."""
    computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    """Another list object whenever a block in it was exchanged for an equal one."""
    root: BlockHash = field(default_factory=lambda: BlockHash(b""))
    """Where its chain of hashes begins."""
    hashes: list[BlockHash] = field(default_factory=list)
    named_blocks: int = 0
    announced_blocks: int = 0
    """Blocks that others may wait for instead of computing them: those before this one."""
    uncached: int = 0
    """Tokens that nobody here had computed, or was computing, when it arrived."""
    arrival: int = 0
    """Number of its arrival here."""
    rank: Rank = LAST
    turn: int = 0
    """The last step it had a turn in, while there were too many for each to be in every step."""
    passed: int = 0
    """How many legs behind this one were let in because it did not fit and they did."""
    awaits: BlockHash | None = None
    """Block that another leg is writing; waited for instead of queueing."""
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
    quiet: tuple[Phase, int, int] | None = None
    """Where it was at the last look; `quiet_ms` it has been there since the first that saw it."""
    quiet_ms: int = 0
    # its draws, and what is told of them
    steering: Steering | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Of prompt tokens 1, 2, ... as far as they are computed; told with the first token."""
    # set when the leg is over but a transfer or a step still touches its blocks
    end: tuple[EndReason, str, bool] | None = None
    key: str = field(init=False)
    """Of its rows in plans and results."""

    def __post_init__(self) -> None:
        self.key = self.ref.key

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

    @property
    def retried(self) -> bool:
        """It replaces an attempt that had a worker and lost it, or the other one."""
        return self.ref.attempt > 0

    @property
    def tells_prompt(self) -> bool:
        """Each position of its prompt is still to be computed, for its logprobs are wanted: no
        cache is read. They are told with the first token, and so not again by a continuation."""
        return self.outputs == 0 and self.spec.sampling.prompt_logprobs is not None

    def move(self, after: Phase) -> None:
        check_move(self.key, self.phase, after)
        self.phase = after


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a leg's prefix."""

    blocks: list[BlockId]
    source: BlockId | None = None
    """Block whose first `copied_tokens` tokens come next; to be copied, for it is another's."""
    copied_tokens: int = 0


@dataclass(slots=True)
class EngineState:
    limits: EngineLimits
    pool: BlockPool
    legs: dict[LegRef, Leg] = field(default_factory=dict)
    waiting: dict[LegRef, Leg] = field(default_factory=dict)
    """WAITING, ASKING and READY legs, in no order: `ready` and `unasked` have them by rank."""
    reserving: dict[LegRef, Leg] = field(default_factory=dict)
    ready: LegQueue = field(default_factory=LegQueue)
    """Waiting legs that could start if there is room."""
    unasked: LegQueue = field(default_factory=LegQueue)
    """Waiting legs for which decode was not asked for room yet."""
    reservations: LegQueue = field(default_factory=LegQueue)
    inflight: Inflight = field(default_factory=Inflight)
    running: list[Leg] = field(default_factory=list)
    """RUNNING legs in order of admission."""
    receiving: int = 0
    resuming: int = 0
    """Waiting legs that were preempted."""
    asking_tokens: Counter[str] = field(default_factory=Counter)
    """Of the ASKING legs, by whom they ask."""
    granted_tokens: int = 0
    """Of the READY legs."""
    stepping: Plan | None = None
    """The step that was planned and is not completed: its rows write, whatever happens."""
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    """Of the step; it holds their sources."""
    outliving: list[Leg] = field(default_factory=list)
    """Legs that ended while it ran; they hold their blocks to its end."""
    step: int = 0
    streams: int = 0
    """Legs that were one token from their next when the last step was planned."""
    arrivals: int = 0
    planned_tokens: int = 0
    preemptions: int = 0
    cache_hit_tokens: int = 0
    cache_miss_tokens: int = 0

    def blocks_for(self, tokens: int) -> int:
        return cdiv(tokens, self.limits.block_size)

    def steps_with(self, leg: Leg) -> bool:
        """Whether the step that runs now writes into the leg's blocks."""
        return self.stepping is not None and any(r.key == leg.key for r in self.stepping.rows)

    # ---- queues ------------------------------------------------------------------------------

    def arrive(self, leg: Leg) -> None:
        """Hash and rank a leg that is here for the first time, and let it wait."""
        leg.root = chain_root(self.limits.salt, leg.spec.cache_salt)
        self.hash(leg)
        hits = len(self.cached_blocks(leg))
        shared = 0 if leg.tells_prompt else self.inflight.shared(leg.hashes[hits:])
        known = hits + shared
        leg.uncached = max(leg.total - known * self.limits.block_size, 1)
        arrival = Arrival(self.planned_tokens, leg.uncached, leg.spec.priority)
        self.arrivals += 1
        leg.arrival = self.arrivals
        leg.rank = (1, self.limits.policy(arrival), leg.arrival)
        if leg.retried:  # it had its turn: what it held is given to it again before it is to others
            leg.rank = (0, leg.spec.priority, leg.arrival)
        self.enqueue(leg)

    def enqueue(self, leg: Leg) -> None:
        """Into the queue of its phase."""
        if leg.phase is Phase.RESERVING:
            self.reserving[leg.ref] = leg
            self.reservations.add(leg, leg.rank)
            return
        self.waiting[leg.ref] = leg
        if leg.phase is Phase.READY or not leg.handoff:
            self.ready.add(leg, leg.rank)
        elif leg.phase is Phase.WAITING:
            self.unasked.add(leg, leg.rank)

    def dequeue(self, leg: Leg) -> None:
        """Out of every queue: it starts, or ends."""
        for queue in (self.ready, self.unasked, self.reservations):
            queue.discard(leg)
        self.inflight.leave(leg)
        self.reserving.pop(leg.ref, None)
        if self.waiting.pop(leg.ref, None) is None:
            return
        if leg.phase is Phase.ASKING:
            self.answered(leg)
        elif leg.phase is Phase.READY:
            self.granted_tokens -= leg.total
        elif leg.preemptions:
            self.resuming -= 1

    def answered(self, leg: Leg) -> None:
        """It asks no more."""
        self.asking_tokens[leg.reader] -= leg.total
        if not self.asking_tokens[leg.reader]:
            del self.asking_tokens[leg.reader]

    def park(self, leg: Leg) -> bool:
        """Let the leg wait for blocks it shares with one that is on its way; whether it does."""
        if leg.tells_prompt:
            return False
        hits = len(self.cached_blocks(leg))
        usable = leg.hashes[hits : (leg.total - 1) // self.limits.block_size]
        shared = self.inflight.shared(usable)
        # A relay ends with its whole prompt: a small common beginning is not worth that wait.
        if shared == 0 or (leg.phase is Phase.RESERVING and 2 * shared < len(usable)):
            return False
        for queue in (self.ready, self.unasked, self.reservations):
            queue.discard(leg)
        self.inflight.park(leg, usable[shared - 1])
        return True

    def announce(self, leg: Leg) -> None:
        """Its unnamed full blocks will be written: others with the same prefix wait for them."""
        leg.announced_blocks = leg.total // self.limits.block_size
        self.inflight.announce(leg, leg.hashes[leg.named_blocks : leg.announced_blocks])

    def give_up(self, leg: Leg) -> None:
        """What it announced and has not written will not come."""
        announced = leg.hashes[leg.named_blocks : leg.announced_blocks]
        leg.announced_blocks = 0
        self._wake(self.inflight.done(leg, announced))

    def _wake(self, legs: list[Leg]) -> None:
        for leg in legs:
            self.enqueue(leg)

    # ---- prefixes ----------------------------------------------------------------------------

    def name(self, leg: Leg) -> None:
        """Make the leg's full computed blocks findable as prefixes; hold each equal block once."""
        full = leg.computed // self.limits.block_size
        before = leg.named_blocks
        if full <= before:
            return
        self.hash(leg)
        for i in range(before, full):
            kept = self.pool.register(leg.blocks[i], self._name_of(leg, i))
            if kept != leg.blocks[i]:
                leg.blocks = [*leg.blocks[:i], kept, *leg.blocks[i + 1 :]]
        leg.named_blocks = full
        if before < leg.announced_blocks:
            self._wake(self.inflight.done(leg, leg.hashes[before:full]))

    def name_tail(self, leg: Leg) -> None:
        """The same for the block behind them, so that a next turn finds all of an answer."""
        self.name(leg)
        size = self.limits.block_size
        start = leg.named_blocks * size
        if leg.computed > start:
            tail = Name(self._parent(leg, leg.named_blocks), tuple(leg.known[start : leg.computed]))
            self.pool.register(leg.blocks[leg.named_blocks], tail)

    def _name_of(self, leg: Leg, i: int) -> Name:
        size = self.limits.block_size
        tokens = tuple(leg.known[i * size : (i + 1) * size])
        return Name(self._parent(leg, i), tokens, leg.hashes[i])

    def _parent(self, leg: Leg, i: int) -> BlockHash:
        return leg.hashes[i - 1] if i else leg.root

    def hash(self, leg: Leg) -> None:
        extend_hashes(leg.hashes, leg.known, self.limits.block_size, leg.root)

    def cached_blocks(self, leg: Leg) -> list[BlockId]:
        """Cached blocks of the leg's longest prefix; one token is always left to compute."""
        self.hash(leg)
        if leg.tells_prompt:
            return []
        usable = (leg.total - 1) // self.limits.block_size
        return self.pool.lookup(leg.hashes[:usable])

    def cached_prefix(self, leg: Leg) -> Hit:
        """To the token: the cached blocks and, of the block behind them, what another has."""
        blocks = self.cached_blocks(leg)
        if leg.tells_prompt or leg.phase is Phase.RESERVING:
            return Hit(blocks)  # a relay begins at a block
        start = len(blocks) * self.limits.block_size
        wanted = leg.known[start : min(start + self.limits.block_size, leg.total - 1)]
        source, count = self.pool.lookup_part(self._parent(leg, len(blocks)), wanted)
        return Hit(blocks, source, count)

    def check(self) -> None:
        """Assert that pool and legs agree: no block without a live holder (L4)."""
        self.pool.check()
        legs = self.legs.values()
        held = Counter(source for source, _ in self.copies)
        for leg in legs:
            assert leg.phase in HOLDING or not leg.blocks
            held.update(leg.blocks)
        assert held == self.pool.holders(), "a block has no live holder, or one that lets it go"
        by_phase = Counter(leg.phase for leg in legs)
        assert by_phase[Phase.ENDED] == 0
        assert by_phase[Phase.RUNNING] == len(self.running)
        assert all(leg.phase is Phase.RUNNING for leg in self.running)
        assert by_phase[Phase.RECEIVING] == self.receiving
        assert {leg.ref for leg in legs if leg.phase in QUEUED} == self.waiting.keys()
        assert by_phase[Phase.RESERVING] == len(self.reserving)
        parked = sum(leg.awaits is not None for leg in legs)
        queued = len(self.ready) + len(self.unasked) + len(self.reservations) + parked
        assert queued + by_phase[Phase.ASKING] == len(self.waiting) + len(self.reserving)
        self.inflight.check(legs)
