"""What every HTTP request passes first: the allowed origins, the API key, a place.

On the ASGI level, around the whole application: a path that nobody thought of is guarded too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.services.router.api_keys import ApiKeys
from kvrelay.services.router.openai.errors import Failure, failure_of, no_key
from kvrelay.services.router.openai.exchange import header, label_of
from kvrelay.shared.errors import Overloaded

PROBES = frozenset({"/health", "/ready"})
"""Asked by machines that have no key: they tell nothing but whether this process is well."""

_EXPOSED = "x-request-id, retry-after, retry-after-ms"
_METHODS = "GET, POST, OPTIONS"
_PREFLIGHT_S = "600"
_REMEMBERED_ENDS = 64


@dataclass(frozen=True, slots=True)
class GateRules:
    """Who may come in."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    origins: frozenset[str] = frozenset()
    """Web pages from there may call; `*` allows all."""
    max_requests: int = 4096
    """Most at the same time, probes aside; beyond it is a 429."""
    unguarded: frozenset[str] = PROBES
    """Paths that need neither key nor place, or have a guard of their own."""


class Places:
    """Counts who is in, and knows from those who left how soon a place gets free."""

    def __init__(self, most: int, now_ns: Callable[[], int]) -> None:
        self._most = most
        self._now_ns = now_ns
        self._ends: deque[int] = deque(maxlen=_REMEMBERED_ENDS)
        self.taken = 0

    def take(self) -> None:
        """Raises `Overloaded`."""
        if self.taken >= self._most:
            message = f"{self._most} requests are being served, which is the most at the same time"
            raise Overloaded(message, retry_after_s=self._next_end_s())
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._ends.append(self._now_ns())

    def _next_end_s(self) -> float:
        """At the rate of the last ends, and no sooner than the present pause is long."""
        if not self._ends:
            return 1.0
        now = self._now_ns()
        mean = (now - self._ends[0]) / len(self._ends)
        return max(0.05, mean / 1e9, (now - self._ends[-1]) / 1e9)


class Gate:
    """An ASGI application around another."""

    def __init__(
        self, app: ASGIApp, rules: GateRules, places: Places, request_id: Callable[[], str]
    ) -> None:
        self._app = app
        self._rules = rules
        self._places = places
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._rules.origins and (origin := header(scope, b"origin")):
            allowed = self._allowed(origin)
            if allowed and _is_preflight(scope):
                await _answer(send, 204, _preflight(scope, allowed))
                return
            send = _with_headers(send, _cors(allowed))
        await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._rules.unguarded:
            await self._app(scope, receive, send)
            return
        keys = self._rules.keys
        if keys.wanted and not keys.admits(given := key_of(scope)):
            await self._refuse(scope, send, no_key(missing=not given))
            return
        try:
            self._places.take()
        except Overloaded as error:
            await self._refuse(scope, send, failure_of(error))
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.give_back()

    async def _refuse(self, scope: Scope, send: Send, failure: Failure) -> None:
        body = failure.body()
        kind, size = ("content-type", "application/json"), ("content-length", str(len(body)))
        named = ("x-request-id", label_of(scope) or self._request_id())
        await _answer(send, failure.status, (kind, size, named, *failure.headers), body)

    def _allowed(self, origin: str) -> str:
        """What the answer names as allowed; "" for an origin that is not."""
        if "*" in self._rules.origins:
            return "*"
        return origin if origin in self._rules.origins else ""


def key_of(scope: Scope) -> str:
    """Of `Authorization: Bearer`, or of `X-Api-Key`; "" for none."""
    scheme, _, key = header(scope, b"authorization").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return header(scope, b"x-api-key")


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and bool(header(scope, b"access-control-request-method"))


Pairs = Iterable[tuple[str, str]]


def _preflight(scope: Scope, allowed: str) -> Pairs:
    asked = header(scope, b"access-control-request-headers")[:1024]
    yield from _cors(allowed)
    yield "access-control-allow-methods", _METHODS
    yield "access-control-max-age", _PREFLIGHT_S
    if asked:
        yield "access-control-allow-headers", asked


def _cors(allowed: str) -> Pairs:
    yield "vary", "origin"
    if allowed:
        yield "access-control-allow-origin", allowed
        yield "access-control-expose-headers", _EXPOSED


def _encoded(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def _with_headers(send: Send, pairs: Pairs) -> Send:
    more = _encoded(pairs)

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return sending


async def _answer(send: Send, status: int, pairs: Pairs, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": _encoded(pairs)})
    await send({"type": "http.response.body", "body": body})
