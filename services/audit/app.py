"""`kvrelay audit`: takes pictures of a cluster until nothing is wrong, or stays wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console

from kvrelay.services.audit import view
from kvrelay.services.audit.ask import Absent, Silent, ask_router, ask_worker
from kvrelay.services.audit.compare import Finding, compare, staying
from kvrelay.services.audit.config import AuditConfig
from kvrelay.services.audit.facts import Picture, RouterFacts, WorkerFacts
from kvrelay.shared.errors import ConfigError, StoreError
from kvrelay.shared.store.directory import WorkerView
from kvrelay.shared.store.keys import Keys
from kvrelay.shared.store.records import RouterRecord
from kvrelay.shared.store.survey import Survey, Surveyor

PICTURES: Final = 5
EVERY_S: Final = 1.0
"""Between pictures. What is no fault lasts less than all of them take: a lease (1.5 s), a batch of
the directory that is tried again (1.6 s), what was assigned (3 s), the relay's leftovers (3 s)."""

CLEAN, FOUND, UNASKED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]
    unasked: Mapping[str, str]
    """Who gave no answer -> why."""
    last: Picture = field(default_factory=Picture)
    pictures: int = 0

    @property
    def status(self) -> int:
        return UNASKED if self.unasked else FOUND if self.findings else CLEAN


def run(config: AuditConfig, console: Console) -> int:
    """The exit status. Raises `ConfigError`."""
    urls = tuple(map(router_url, config.routers))
    try:
        report = asyncio.run(audit(config, urls))
    except StoreError as error:
        report = Report((), {"Redis": str(error)})
    (view.as_json if config.as_json else view.as_table)(report, console)
    return report.status


def router_url(text: str) -> str:
    """Raises `ConfigError`."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(f"--router is {text!r}: must be like http://10.0.0.9:8000")
    return url.rstrip("/")


async def audit(config: AuditConfig, urls: tuple[str, ...]) -> Report:
    """Raises `StoreError` when Redis does not answer."""
    surveyor = Surveyor(config.redis_url, Keys(config.cluster))
    found: list[Finding] = []
    silent: dict[str, str] = {}
    try:
        for number in range(1, PICTURES + 1):
            picture = await take(await surveyor.survey(), urls)
            seen = compare(picture)
            found = seen if number == 1 else staying(found, seen)
            # Who was silent and is not there any more was never asked, and may hold anything.
            answered = {worker.name for worker in picture.workers if worker.answer is not None}
            answered |= {router.name for router in picture.routers if router.answer is not None}
            silent = {who: why for who, why in silent.items() if who not in answered}
            silent |= picture.silent
            if not found and not silent:
                break
            if number < PICTURES:
                # The pace of pictures, not a wait for something.
                await asyncio.sleep(EVERY_S)
    finally:
        await surveyor.close()
    return Report(tuple(found), silent, picture, number)


async def take(survey: Survey, urls: tuple[str, ...]) -> Picture:
    """Everybody is asked at the same time."""
    silent: dict[str, str] = {}
    asked_workers = asyncio.gather(
        *(_worker(seen, survey, silent) for seen in survey.cluster.workers)
    )
    asked_routers = _routers(survey.routers, urls, silent)
    workers, routers = await asyncio.gather(asked_workers, asked_routers)
    return Picture(
        workers=tuple(workers),
        routers=routers,
        ledger=survey.ledger,
        strays=survey.strays,
        rejected=survey.rejected,
        silent=silent,
    )


async def _worker(seen: WorkerView, survey: Survey, silent: dict[str, str]) -> WorkerFacts:
    record = seen.record
    name = f"{record.name} ({record.incarnation[:12]})"
    answer, absent = None, ""
    try:
        answer = await ask_worker(record)
    except Absent as error:
        absent = str(error)
    except Silent as error:
        silent[name] = str(error)
    told = survey.directory[record.incarnation]
    return WorkerFacts(
        record.incarnation, name, seen.load, seen.assigned_tokens, told, answer, absent
    )


async def _routers(
    records: tuple[RouterRecord, ...], urls: tuple[str, ...], silent: dict[str, str]
) -> tuple[RouterFacts, ...]:
    """Those that were named, and then the others where Redis knows their address."""
    found: list[RouterFacts] = []
    left = {record.incarnation: record for record in records}
    for url in urls:
        at = urlsplit(url).netloc
        # A token goes to an address that may be its router's, and to no other.
        likely = [each for each in left.values() if each.http_address in (at, "")]
        try:
            page = await ask_router(url, likely or left.values())
        except (Absent, Silent) as error:
            silent[url] = str(error)
        else:
            del left[page.record.incarnation]
            names = frozenset((page.record.incarnation, page.router))
            found.append(RouterFacts(names, _router_name(page.record), page.answer))
    others = await asyncio.gather(*(_registered(record, silent) for record in left.values()))
    return (*found, *others)


async def _registered(record: RouterRecord, silent: dict[str, str]) -> RouterFacts:
    name, own = _router_name(record), frozenset((record.incarnation,))
    if not record.http_address:
        silent[name] = "it listens on all addresses: name one with --router"
        return RouterFacts(own, name)
    try:
        page = await ask_router(f"http://{record.http_address}", [record])
    except Absent as error:
        return RouterFacts(own, name, absent=str(error))
    except Silent as error:
        silent[name] = str(error)
        return RouterFacts(own, name)
    return RouterFacts(own | {page.router}, name, page.answer)


def _router_name(record: RouterRecord) -> str:
    return f"{record.name} ({record.incarnation[:12]})"
