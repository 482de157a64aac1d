"""What a worker tells of its blocks, and what a router makes of it, whatever is in between."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.desk import desk
from tests.sim.engine_world import World
from tests.sim.model import BLOCK

from kvrelay.shared.kv.holdings import SMALL, Batch, Publication, Replica, Snapshot
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes
from kvrelay.shared.types import LegSpec, SamplingParams


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def digests(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(digest(number) for number in numbers)


@dataclass(slots=True)
class Server:
    """What `blocks.lua` does."""

    seq: int = 0
    snapshot: Snapshot | None = None
    log: list[Batch] = field(default_factory=list)

    def write(self, batch: Batch, snapshot: Snapshot | None) -> bool:
        if batch.whole:
            self.log = []
        elif batch.seq != self.seq + 1:
            return False
        self.seq = batch.seq
        self.log.append(batch)
        if snapshot is not None:
            self.snapshot, self.log = snapshot, self.log[-1:]
        return True

    def behind(self, position: int) -> list[Batch]:
        return [batch for batch in self.log if batch.seq > position]


@dataclass(slots=True)
class Pair:
    """A worker and one router's view of it."""

    small: int = 0
    held: set[BlockHash] = field(default_factory=set)
    touched: list[BlockHash] = field(default_factory=list)
    server: Server = field(default_factory=Server)
    replica: Replica = field(default_factory=Replica)
    told: list[Batch] = field(default_factory=list)
    publication: Publication = field(init=False)

    def __post_init__(self) -> None:
        self.publication = Publication(self.held.__contains__)

    def flip(self, numbers: Iterable[int]) -> None:
        flipped = digests(*numbers)
        self.held ^= {*flipped}
        self.touched += flipped

    def publish(self, *, arrives: bool = True, answered: bool = True) -> Batch | None:
        edition = self.publication.next(self.touched)
        self.touched = []
        if edition is None:
            return None
        self.told.append(edition[0])
        done = arrives and self.server.write(*edition)
        if not (done and answered):
            self.publication.lost()
        return edition[0]

    def settle(self) -> int:
        """Read as a router does, until nothing is behind; how many snapshots that took."""
        loads = 0
        while True:
            if self.replica.needs_snapshot:
                self.replica.load(self.server.snapshot)
                loads += 1
            batches = self.server.behind(self.replica.position)
            if not batches and not self.replica.needs_snapshot:
                return loads
            for batch in batches:
                self.replica.apply(batch)
            assert loads < 4, "it asks for the same snapshot over and over"


def test_only_what_came_or_went_since_is_told_and_nothing_is_told_of_nothing() -> None:
    pair = Pair()
    assert pair.publish() is None
    pair.flip([1, 2, 3])
    pair.flip([3])
    assert pair.publish() == Batch(1, digests(1, 2))
    pair.flip([2, 4])
    pair.flip([1, 2])
    pair.flip([1, 2])
    assert pair.publish() == Batch(2, digests(4), digests(2))
    assert pair.publish() is None
    assert pair.server.snapshot is None


def test_a_snapshot_goes_along_when_the_batches_have_become_longer_than_it() -> None:
    pair = Pair()
    pair.flip(range(2 * SMALL))
    assert pair.publish() == Batch(1, digests(*range(2 * SMALL)))
    pair.flip([0])
    pair.publish()
    pair.flip([0])
    pair.publish()
    assert pair.server.snapshot == Snapshot(2, frozenset(digests(*range(1, 2 * SMALL))))
    assert [batch.seq for batch in pair.server.log] == [2, 3]


def test_more_changes_than_blocks_are_told_as_a_snapshot() -> None:
    pair = Pair()
    pair.flip(range(SMALL + 3))
    pair.publish()
    pair.flip(range(1, SMALL + 3))
    assert pair.publish() == Batch(2, whole=True)
    assert pair.server.snapshot == Snapshot(2, frozenset(digests(0)))
    assert pair.server.log == [Batch(2, whole=True)]


def test_what_may_not_have_been_written_is_told_again_whole() -> None:
    pair = Pair()
    pair.flip([1])
    pair.publish()
    pair.flip([2])
    pair.publish(answered=False)
    assert pair.publish() == Batch(3, whole=True)
    assert pair.server.snapshot == Snapshot(3, frozenset(digests(1, 2)))
    pair.server = Server()
    pair.flip([3])
    assert pair.publish() == Batch(4, digests(3))
    assert pair.server.log == [], "it did not follow from what was there"
    assert pair.publish() == Batch(5, whole=True)
    pair.settle()
    assert pair.replica.held == frozenset(digests(1, 2, 3))


def test_one_who_never_told_anything_has_nothing_to_repeat() -> None:
    pair = Pair()
    pair.publication.lost()
    assert pair.publish() is None


def test_a_router_counts_from_the_first_block_on() -> None:
    replica = Replica()
    replica.load(None)
    replica.apply(Batch(1, digests(1, 2, 3, 5)))
    counts = [replica.count(digests(*chain)) for chain in ([], [9], [1], [1, 2, 3, 4, 5], [2, 3])]
    assert counts == [0, 0, 1, 3, 2]


def test_old_batches_change_nothing_and_a_missing_one_asks_for_the_snapshot_once() -> None:
    replica = Replica()
    assert replica.needs_snapshot
    replica.load(Snapshot(5, frozenset(digests(1, 2))))
    replica.apply(Batch(5, digests(9)))
    replica.apply(Batch(4, (), digests(1)))
    assert (replica.held, replica.needs_snapshot) == (frozenset(digests(1, 2)), False)
    replica.apply(Batch(7, digests(3)))
    assert (replica.needs_snapshot, replica.position, replica.seq) == (True, 7, 5)
    replica.load(Snapshot(4, frozenset()))
    assert (replica.needs_snapshot, replica.position) == (False, 5)
    replica.apply(Batch(7, digests(3)))
    assert not replica.needs_snapshot
    replica.apply(Batch(8, digests(4)))
    assert replica.needs_snapshot
    replica.load(Snapshot(8, frozenset(digests(3, 4))))
    replica.apply(Batch(9, digests(5), digests(3)))
    assert (replica.held, replica.position) == (frozenset(digests(4, 5)), 9)


MISHAPS = ("publish", "publish", "unanswered", "unsent", "wiped", "deliver", "deliver", "load")


def mishap(pair: Pair, rng: random.Random) -> None:
    kind = rng.choice(MISHAPS)
    if kind in ("publish", "unanswered", "unsent"):
        pair.publish(arrives=kind != "unsent", answered=kind != "unanswered")
    elif kind == "wiped":
        pair.server = Server()
        pair.publication.lost()
    elif kind == "load":
        pair.replica.load(pair.server.snapshot)
    elif pair.server.log:
        for batch in rng.choices(pair.server.log, k=rng.randint(1, 5)):
            pair.replica.apply(batch)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), events=st.integers(1, 60))
def test_any_loss_duplication_and_reordering_ends_in_the_truth(seed: int, events: int) -> None:
    rng = random.Random(seed)
    pair = Pair()
    for _ in range(events):
        pair.flip(rng.sample(range(20), rng.randrange(4)))
        if rng.random() < 0.1:
            pair.flip(range(100, 100 + SMALL))
        mishap(pair, rng)
    while pair.publish() is not None:  # a batch that did not follow is told again
        pass
    pair.settle()
    assert pair.replica.held == pair.held


class Publisher:
    """Tells what the pool of an engine holds."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.touched = pool.watch()
        self.server = Server()
        self.publication = Publication(pool.holds)
        self.replica = Replica()
        self.replica.load(None)

    def tell(self) -> frozenset[BlockHash]:
        """What a router knows then."""
        edition = self.publication.next(self.touched)
        self.touched.clear()
        if edition is not None:
            assert self.server.write(*edition)
            self.replica.apply(edition[0])
        return self.replica.held


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_the_pool_after_anything_that_happens_to_an_engine(seed: int) -> None:
    world = World(random.Random(seed))
    publisher = Publisher(world.engine.state.pool)
    most = 0
    for _ in range(600):
        world.act()
        if world.rng.random() < 0.3:
            assert publisher.tell() == publisher.pool.digests()
            most = max(most, len(publisher.replica.held))
    assert most >= 6 and publisher.replica.seq > 50


def test_full_blocks_are_told_under_the_digests_a_router_computes_and_tails_are_not() -> None:
    chat = desk(blocks=40)
    publisher = Publisher(chat.engine.state.pool)
    prompt = tuple(range(2 * BLOCK + 1))
    sampling = SamplingParams(max_tokens=BLOCK + 2)
    chat.submit(LegSpec("a", prompt, sampling))
    chat.submit(LegSpec("b", prompt, sampling, cache_salt="tenant"))
    chat.finish()
    # Three blocks and two slots of each were computed: the last token of an answer is not.
    ours: list[BlockHash] = []
    extend_hashes(ours, [*prompt, *chat.answers["a"]][:-1], BLOCK, chain_root(b"desk"))
    theirs: list[BlockHash] = []
    extend_hashes(theirs, [*prompt, *chat.answers["b"]][:-1], BLOCK, chain_root(b"desk", "tenant"))
    assert publisher.tell() == {*ours, *theirs}
    assert (len(ours), len(theirs), publisher.replica.count(ours)) == (3, 3, 3)
