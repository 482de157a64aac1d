"""`kvrelay top`: what the dashboard shows, in a terminal. Asks one router, changes nothing."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from kvrelay.services.top_config import TopConfig
from kvrelay.services.top_view import picture
from kvrelay.shared.errors import KvrelayError, Unavailable

ASK_S: Final = 3.0
MOST_BYTES: Final = 8 << 20


def run(config: TopConfig, console: Console) -> int:
    """The exit code. Raises `KvrelayError` when the router cannot be asked at all."""
    page = ask(config)
    if config.as_json:
        console.print(json.dumps(page), markup=False, highlight=False, soft_wrap=True)
        return 0
    if config.once or not console.is_terminal:
        console.print(picture(page))
        return 0
    with suppress(KeyboardInterrupt):  # that is how one leaves
        _watch(config, console, page)
    return 0


def _watch(config: TopConfig, console: Console, page: dict[str, Any]) -> None:
    """Until Ctrl-C; a router that goes away is waited for."""
    with Live(picture(page), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(config.every_s)
            try:
                page, problem = ask(config), ""
            except Unavailable as error:
                problem = str(error)
            live.update(picture(page, problem), refresh=True)


def ask(config: TopConfig) -> dict[str, Any]:
    """Raises as `asked` does."""
    key = config.api_key[0] if config.api_key else ""
    page = asked(config.router, key, f"/dashboard/api/cluster?requests={config.requests}")
    if not {"totals", "workers", "pairs", "requests"} <= page.keys():
        raise KvrelayError(f"router: {config.router} does not answer as a router does")
    return page


def asked(router: str, key: str, path: str, missing: str = "") -> dict[str, Any]:
    """A router's answer to a question of its dashboard. Raises `Unavailable` when nobody answers,
    `KvrelayError` when that is no router, wants a key, or knows of no such thing (`missing`)."""
    router = router.rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        question = urllib.request.Request(f"{router}{path}", headers=headers)
        with opener.open(question, timeout=ASK_S) as answer:
            page = json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        if error.code == 404 and missing and b"no request of that name" in error.read(MOST_BYTES):
            raise KvrelayError(missing) from error
        raise _refused(router, error.code) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise Unavailable(f"no router answers at {router}: {why}") from error
    except ValueError as error:
        raise KvrelayError(f"router: {router} does not answer as a router does") from error
    if not isinstance(page, dict):
        raise KvrelayError(f"router: {router} does not answer as a router does")
    return page


def _refused(router: str, status: int) -> KvrelayError:
    if status == 401:
        return KvrelayError(f"api-key: {router} wants one of its API keys (KVRELAY_API_KEY)")
    if status == 404:
        return KvrelayError(
            f"router: {router} has no dashboard: give its admin port if it has one, or it is of an "
            "older version"
        )
    return Unavailable(f"{router} answers {status}")
