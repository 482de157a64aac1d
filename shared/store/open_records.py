"""Ledger records that have not ended: found by their index, and closed when nobody owns them.

For sweepers and audits. What lies in Redis is read with care: a record that cannot be read is
left to its lifetime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

from kvrelay.shared.store.connection import connect_async, mapped_errors, script
from kvrelay.shared.store.keys import REQUEST_TTL_MS, Keys
from kvrelay.shared.store.ledger import FINAL_RANK, RANK, Phase
from kvrelay.shared.store.records import OpenRecord

TIMEOUT_S: Final = 0.5
MOST_RECORDS: Final = 256
"""In one answer; a sweeper comes again for the rest."""


class OpenRecords:
    """One per reader, used from one event loop. All calls raise `StoreError`."""

    def __init__(self, url: str, keys: Keys) -> None:
        """Raises `ConfigError`; connects on first use."""
        self._url = url
        self._keys = keys
        self._client = connect_async(url, connections=1)
        self._find = self._client.register_script(script("orphans"))
        self._close = self._client.register_script(script("sweep"))

    async def orphans(self) -> list[OpenRecord]:
        """Some of the records whose router holds no lease; none means that there are none.

        One round trip, whose cost is that of the number of routers when there is nothing.
        """
        return await self._records("gone", MOST_RECORDS)

    async def all(self, most: int = MOST_RECORDS) -> list[OpenRecord]:
        return await self._records("all", most)

    async def close_swept(self, router: str, records: Sequence[OpenRecord], sweeper: str) -> int:
        """Close records of `router`; how many were closed here, and not by another before.

        None if `router` holds a lease (again), and none that has changed since it was read.
        """
        keys = [
            *(self._keys.owners, self._keys.router(router), self._keys.open_records(router)),
            *(self._keys.request(record.leg) for record in records),
        ]
        args: list[str | int] = [router, sweeper, REQUEST_TTL_MS, FINAL_RANK]
        args += [Phase.SWEPT, RANK[Phase.SWEPT]]
        for record in records:
            args += [record.leg, record.attempt, record.nonce]
        return max(cast(int, await self._ask(lambda: self._close(keys, args))), 0)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _records(self, which: str, most: int) -> list[OpenRecord]:
        prefixes = [self._keys.prefix(family) for family in ("router", "open", "req")]
        args: list[str | int] = [*prefixes, REQUEST_TTL_MS, most, which]
        answer = await self._ask(lambda: self._find([self._keys.owners], args))
        found = (_record(row) for row in cast(list[list[bytes]], answer))
        return [record for record in found if record is not None]

    async def _ask(self, call: Callable[[], Awaitable[object]]) -> object:
        with mapped_errors(self._url):
            async with asyncio.timeout(TIMEOUT_S):
                return await call()


def _record(row: list[bytes]) -> OpenRecord | None:
    leg, router, owned, phase, *rest = (field.decode(errors="replace") for field in row)
    attempt, nonce, prefill, decode, prompt_tokens, output_tokens, updated_ms = rest
    try:
        return OpenRecord(
            leg=leg,
            router=router,
            owned=owned == "1",
            phase=phase,
            attempt=int(attempt),
            nonce=int(nonce),
            prefill=prefill,
            decode=decode,
            prompt_tokens=int(prompt_tokens),
            output_tokens=int(output_tokens),
            updated_ms=int(updated_ms),
        )
    except ValueError:
        return None
