"""The block directory of a real cluster: what the workers hold, under the names routers compute."""

from __future__ import annotations

import asyncio
import random

import redis
from tests.integration.clients import token_ids
from tests.stack import Stack, until

from kvrelay.services.router.holdings import BlockDirectory
from kvrelay.shared.kv.prefix import BlockHash, chain_root, extend_hashes, group_of
from kvrelay.shared.store.blocks import BlockReader
from kvrelay.shared.store.directory import ClusterStore
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.types import Role

KEYS = Keys("kvrelay")


async def held(stack: Stack, tokens: list[int]) -> dict[Role, int]:
    """Blocks of these tokens that a router that starts now finds, by the role of the worker."""
    store = ClusterStore(stack.redis_url, KEYS)
    directory = BlockDirectory(BlockReader(stack.redis_url, KEYS))
    found: dict[Role, int] = {}
    for record in [view.record for view in (await store.snapshot()).workers]:
        await directory.follow(record.incarnation)
        hashes: list[BlockHash] = []
        root = chain_root(group_of(record.fingerprint))
        extend_hashes(hashes, tokens, record.block_size, root)
        found[record.role] = directory.held_blocks(hashes).get(record.incarnation, 0)
    await store.close()
    await directory.close()
    return found


def test_a_router_that_starts_finds_what_the_workers_hold_after_a_wipe_of_redis_too(
    split: Stack,
) -> None:
    prompt = token_ids(random.Random("directory"), 50)
    split.complete(prompt, max_tokens=2, ignore_eos=True)
    everywhere = {Role.PREFILL: 3, Role.DECODE: 3}
    until(lambda: asyncio.run(held(split, prompt)) == everywhere, 2.0, "it was told")
    with redis.Redis.from_url(split.redis_url) as client:
        client.flushall()
    until(lambda: asyncio.run(held(split, prompt)) == everywhere, 5.0, "it is told again")
