"""Everything around one engine: routers, peers, the relay, the device. One event at a time.

The memory is the hash chain of `tests.sim.model`, so KV that is wrong, missing, stale or read too
early gives another token at once. Whatever may still write into blocks does so as late and as badly
as it can: a step computes when it ends, and a relay spoils what it holds until it has forgotten.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.sim.model import BLOCK, SLOT, VOCAB, ChainMemory, chain, sample

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.policy import POLICIES
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.kv.prefix import chain_root
from kvrelay.shared.types import BlockId, EndReason, LegRef, LegSpec, SamplingParams

BLOCKS = 14
MAX_LEGS = 4
MAX_TOKENS = 8
LONGEST = BLOCK * BLOCKS
SALTS = ("", "tenant")
ROOTS = {chain_root(b"test", salt) for salt in SALTS}


class Truth:
    """What an undisturbed run of one leg gives."""

    def __init__(self, spec: LegSpec, peer: bool) -> None:
        self.spec = spec
        self.peer = peer
        """Relayed here: its first token comes from the peer."""
        self.known = [*spec.prompt]
        self.slots: list[int] = []
        for index in range(min(spec.sampling.max_tokens, LONGEST - len(spec.prompt))):
            self.slots_to(len(self.known))
            sampling = spec.sampling
            self.known.append(sample(self.slots, sampling.seed, spec.choice, index))
        self.told = len(spec.seen)

    def slots_to(self, count: int) -> list[int]:
        for token in self.known[len(self.slots) : count]:
            self.slots.append(chain(self.slots[-1] if self.slots else 0, token))
        return self.slots[:count]

    @property
    def answer(self) -> list[int]:
        return self.known[len(self.spec.prompt) :]


class World:
    """`act` lets one thing happen, chosen at random, and checks everything that must hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = rng.choice([*POLICIES.values()])
        limits = EngineLimits(BLOCK, MAX_LEGS, MAX_TOKENS, LONGEST, VOCAB, b"test", policy=policy)
        self.engine = Engine(limits, BLOCKS)
        self.memory = ChainMemory(BLOCKS)
        self.truth: dict[LegRef, Truth] = {}
        self.ended: dict[LegRef, m.Ended] = {}
        self.asked: list[m.NeedRoom] = []
        self.expected: dict[LegRef, m.Expect] = {}
        self.arrived: dict[LegRef, int] = {}
        self.pushes: dict[LegRef, list[m.Push]] = {}
        self.flying: Plan | None = None
        self.happened: Counter[str] = Counter()
        # Of few pieces, so that a block has many pasts.
        pieces = [[rng.randrange(VOCAB) for _ in range(BLOCK)] for _ in range(3)]
        self.texts = [[t for _ in range(6) for t in rng.choice(pieces)] for _ in range(3)]
        self._moves: list[tuple[str, Callable[[], None]]] = [
            *[("submit", self.submit)] * 3,
            *[("reserve", self.reserve)] * 2,
            *[("step", self.step)] * 20,
            *[("room", self.grant)] * 3,
            *[("arrive from peer", self.chunk_arrives)] * 3,
            *[("push done", self.push_done)] * 4,
            *[("published", self.published)] * 2,
            *[("forgotten", self.forgotten)] * 2,
            ("cancel", self.cancel),
            ("router gone", self.router_gone),
            ("relay failed", self.relay_fails),
            ("step failed", self.step_fails),
            ("stale", self.stale),
        ]

    # ---- one event ---------------------------------------------------------------------------

    def act(self) -> None:
        kind, move = self.rng.choice(self._moves)
        self.happened[kind] += 1
        move()
        self.check()

    def check(self) -> None:
        state = self.engine.state
        state.check()
        counts = state.pool.counts()
        parts = counts.free + counts.cached_idle + counts.in_use + counts.quarantined
        assert parts == counts.total == BLOCKS
        index = state.pool._index
        for block in range(BLOCKS):
            if block in index and (parent := index.name(block).parent) not in ROOTS:
                assert index.find(parent) is not None, f"block {block} outlived its parent"
        self._check_step()
        assert self.ended.keys().isdisjoint(state.legs)
        assert len(self.ended) + len(state.legs) == len(self.truth), "every leg is here, or ended"

    def _check_step(self) -> None:
        """What the running step writes into is nobody else's to write, and nobody's to have."""
        if self.flying is None:
            return
        pool = self.engine.state.pool
        held = pool.holders()
        for row in self.flying.rows:
            for position in range(row.start, row.start + len(row.tokens)):
                block = BlockId(row.blocks[position // BLOCK])
                assert held.get(block) == 1 and block not in pool._quarantined

    def tell(self, event: m.Event) -> None:
        self.note(self.engine.handle(event))

    def note(self, out: list[m.Instruction]) -> None:
        for it in out:
            if isinstance(it, m.Ended):
                self._note_end(it)
            elif isinstance(it, m.NeedRoom):
                self.asked.append(it)
            elif isinstance(it, m.Expect):
                self.expected[it.ref] = it
                self.arrived[it.ref] = it.first_missing
            elif isinstance(it, m.Push):
                self._note_push(it)
            elif isinstance(it, m.TokenOut):
                truth = self.truth[it.ref]
                assert it.index == truth.told, "tokens leave in order, once"
                assert it.token == truth.answer[it.index], f"{it.ref.leg}: a wrong token"
                truth.told += 1

    def _note_end(self, end: m.Ended) -> None:
        assert end.ref not in self.ended, "a leg ended twice"
        self.ended[end.ref] = end
        assert not self.pushes.get(end.ref), "it ended while a chunk was being read"
        assert end.ref not in self.expected, "it ended while it could be written"

    def _note_push(self, push: m.Push) -> None:
        queue = self.pushes.setdefault(push.ref, [])
        if queue:
            assert (push.chunk, push.start) == (queue[-1].chunk + 1, queue[-1].end)
        assert sum(push.run_blocks) == len(push.blocks)
        queue.append(push)

    # ---- routers -----------------------------------------------------------------------------

    def leg(self, *, peer: bool) -> tuple[LegRef, LegSpec]:
        rng = self.rng
        text = rng.choice(self.texts)
        prompt = text[: rng.randint(0, 24)] + [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        number = len(self.truth)
        spec = LegSpec(
            f"leg{number}",
            tuple(prompt),
            SamplingParams(max_tokens=rng.randint(1, 14), seed=rng.randrange(2)),
            priority=rng.choice((0, 0, 1)),
            cache_salt=rng.choice(SALTS if rng.random() < 0.5 else SALTS[:1]),
        )
        truth = Truth(spec, peer)
        if rng.random() < 0.2 and len(truth.answer) > 1:
            seen = tuple(truth.answer[: rng.randrange(len(truth.answer))])
            spec = LegSpec(spec.leg, spec.prompt, spec.sampling, seen=seen)
            truth = Truth(spec, peer)
        ref = LegRef(spec.leg, 0, number)
        self.truth[ref] = truth
        return ref, spec

    def owner(self) -> str:
        return self.rng.choice(("a", "b"))

    def submit(self) -> None:
        ref, spec = self.leg(peer=False)
        self.tell(m.Serve(self.owner(), ref, spec, self.rng.random() < 0.4))

    def reserve(self) -> None:
        ref, spec = self.leg(peer=True)
        self.tell(m.Reserve(self.owner(), ref, spec, "P"))

    def live(self) -> LegRef | None:
        legs = [*self.engine.state.legs]
        return self.rng.choice(legs) if legs else None

    def cancel(self) -> None:
        if ref := self.live():
            self.tell(m.Cancel(ref))

    def published(self) -> None:
        if ref := self.live():
            self.tell(m.Published(ref))

    def router_gone(self) -> None:
        if self.rng.random() < 0.2:
            self.tell(m.OwnerGone(self.owner()))

    def grant(self) -> None:
        if not self.asked:
            return
        need = self.asked.pop(self.rng.randrange(len(self.asked)))
        leg = self.engine.state.legs.get(need.ref)
        blocks = self.engine.state.blocks_for(leg.total) if leg else 1
        missing = self.rng.randrange(blocks)
        self.tell(m.RoomGranted(need.ref, missing * BLOCK, (blocks - missing,)))

    def stale(self) -> None:
        """Events about a leg that is over, or never was."""
        ref = self.rng.choice([LegRef("none", 0, 1), *self.ended])
        event = self.rng.choice(
            [
                m.Cancel(ref),
                m.Published(ref),
                m.RoomGranted(ref, 0, (1,)),
                m.RelayFailed(ref, "late"),
                m.Forgotten(ref),
                m.ChunkArrived(ref, 0, 1, last=True, token=1),
            ]
        )
        assert self.engine.handle(event) == []

    # ---- the relay ---------------------------------------------------------------------------

    def write(self, ref: LegRef, start: int, end: int, *, spoil: bool) -> None:
        """What a peer writes of [start, end) into the blocks that are kept for it."""
        expect = self.expected[ref]
        slots = self.truth[ref].slots_to(end)
        for position in range(start, end):
            block = expect.blocks[(position - expect.first_missing) // BLOCK]
            value = self.rng.getrandbits(64) if spoil else slots[position]
            SLOT.pack_into(self.memory.view(block, 1), position % BLOCK * SLOT.size, value)

    def chunk_arrives(self) -> None:
        if not self.expected:
            return
        ref = self.rng.choice([*self.expected])
        expect, start = self.expected[ref], self.arrived[ref]
        if self.engine.state.legs[ref].end is not None:
            self.write(ref, start, expect.total, spoil=True)
            return
        ends = [*range(start + BLOCK, expect.total, BLOCK), expect.total]
        end = self.rng.choice(ends)
        self.write(ref, end, expect.total, spoil=True)
        self.write(ref, start, end, spoil=False)
        last = end == expect.total
        self.arrived[ref] = end
        truth = self.truth[ref]
        if last:
            del self.expected[ref]
        token = truth.answer[truth.told] if last else -1
        self.tell(m.ChunkArrived(ref, start, end, last, token))

    def relay_fails(self) -> None:
        if self.expected and self.rng.random() < 0.3:
            self.tell(m.RelayFailed(self.rng.choice([*self.expected]), "corrupt"))

    def forgotten(self) -> None:
        legs = self.engine.state.legs
        over = [ref for ref in self.expected if legs[ref].end is not None]
        if over:
            ref = self.rng.choice(over)
            expect = self.expected[ref]
            self.write(ref, expect.first_missing, expect.total, spoil=True)
            del self.expected[ref]
            self.tell(m.Forgotten(ref))

    def push_done(self) -> None:
        refs = [ref for ref, queue in self.pushes.items() if queue]
        if not refs:
            return
        ref = self.rng.choice(refs)
        push = self.pushes[ref].pop(0)
        slots = self.truth[ref].slots_to(push.end)
        for position in range(push.start, push.end):
            block = push.blocks[(position - push.start) // BLOCK]
            assert self.slot(block, position) == slots[position], "something else was relayed"
        self.tell(m.PushDone(ref, "lost" if self.rng.random() < 0.1 else None))

    def slot(self, block: BlockId, position: int) -> int:
        view = self.memory.view(block, 1)
        return int(SLOT.unpack_from(view, position % BLOCK * SLOT.size)[0])

    # ---- the device --------------------------------------------------------------------------

    def step(self) -> None:
        """Begin one, or end the one that runs: other events may come in between."""
        if self.flying is None:
            self.flying, out = self.engine.plan(self.rng.randint(1, MAX_TOKENS))
            self.note(out)
            return
        plan, self.flying = self.flying, None
        result = self.memory.run(plan)
        if result.sampled and self.rng.random() < 0.03:
            key = self.rng.choice([*result.sampled])
            del result.sampled[key]
            result = StepResult(plan.step, result.sampled, failed={key: "not a number"})
        self.note(self.engine.complete(plan, result))

    def step_fails(self) -> None:
        """It wrote something, nobody knows what."""
        if self.flying is None or self.rng.random() < 0.7:
            return
        plan, self.flying = self.flying, None
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.tokens)):
                block = row.blocks[position // BLOCK]
                SLOT.pack_into(self.memory.view(block, 1), position % BLOCK * SLOT.size, 1)
        self.note(self.engine.fail_step(plan, "broken"))

    # ---- the end -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing goes wrong any more: everything ends, and all blocks come back."""
        for _ in range(1000):
            if not self.engine.state.legs:
                break
            for move in (self.step, self.grant, self.chunk_arrives, self.push_done, self.forgotten):
                move()
            for ref, leg in [*self.engine.state.legs.items()]:
                if leg.phase == "handing_off":
                    self.tell(m.Published(ref))
            self.check()
        assert not self.engine.state.legs, "somebody waits for ever"
        for ref, end in self.ended.items():
            if end.reason is EndReason.FINISHED:
                truth = self.truth[ref]
                assert truth.told >= min(len(truth.spec.seen) + 1, len(truth.answer))
        counts = self.engine.state.pool.counts()
        assert counts.free + counts.cached_idle == counts.total
