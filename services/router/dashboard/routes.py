"""`GET /dashboard`: a page that shows what this router knows, and the JSON it is made of.

Nothing is kept for it and nothing runs while nobody looks: each answer is made from the router's
own state, and is bounded. The page itself tells nothing, so it needs no key; its JSON does where
clients need one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Protocol

import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvrelay.services.router.dashboard import requests as shown
from kvrelay.services.router.dashboard.cluster import ClusterFacts, cluster_page
from kvrelay.services.router.openai.errors import INVALID, Failure
from kvrelay.shared.telemetry.spans import RequestRecord

PATH: Final = "/dashboard"
API: Final = f"{PATH}/api"
MOST_REQUESTS: Final = 200
REQUESTS: Final = 50
FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/main.js": ("main.js", "text/javascript; charset=utf-8"),
    "/source.js": ("source.js", "text/javascript; charset=utf-8"),
    "/show.js": ("show.js", "text/javascript; charset=utf-8"),
    "/requests.js": ("requests.js", "text/javascript; charset=utf-8"),
    "/waterfall.js": ("waterfall.js", "text/javascript; charset=utf-8"),
    "/cluster.js": ("cluster.js", "text/javascript; charset=utf-8"),
}
OPEN_PATHS: Final = frozenset(PATH + name for name in FILES)
"""The page: the same for everybody."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Flights(Protocol):
    """The requests of late and those in flight (`FlightRecorder`)."""

    def recent(self, limit: int) -> list[RequestRecord]: ...
    def find(self, id: str) -> RequestRecord | None: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """What the page is about."""

    cluster: Callable[[], ClusterFacts]
    flights: Flights
    now_ns: Callable[[], int]


def dashboard_routes(what: Shown) -> list[Route]:
    def list_of(limit: int) -> list[shown.Line]:
        return shown.page(what.flights.recent(limit), what.now_ns())

    async def cluster(request: Request) -> Response:
        """With `requests=N` the newest ones, too: what the page asks for each second."""
        page = cluster_page(what.cluster())
        if "requests" in request.query_params:
            if (limit := _limit(request, "requests")) is None:
                return _wrong_limit("requests", request)
            page["requests"] = list_of(limit)
        return _json(request, page)

    async def recent(request: Request) -> Response:
        if (limit := _limit(request, "limit")) is None:
            return _wrong_limit("limit", request)
        return _json(request, {"requests": list_of(limit)})

    async def one(request: Request) -> Response:
        record = what.flights.find(request.path_params["id"])
        if record is None:
            message = (
                "id: no request of that name is in flight or among the last ones that ended here"
            )
            return _failure(Failure(404, INVALID, message, code="not_found"))
        return _json(request, shown.whole(record, what.now_ns()))

    return [
        *(Route(PATH + name, _file) for name in FILES),
        Route(f"{API}/cluster", cluster),
        Route(f"{API}/requests", recent),
        Route(f"{API}/requests/{{id}}", one),
    ]


async def _file(request: Request) -> Response:
    name, kind = FILES[request.url.path.removeprefix(PATH)]
    return _tagged(request, _content(name), kind)


@cache
def _content(name: str) -> bytes:
    return files(__package__).joinpath("page", name).read_bytes()


def _limit(request: Request, name: str) -> int | None:
    """None for one that is out of bounds."""
    given = request.query_params.get(name, str(REQUESTS))
    if not (given.isascii() and given.isdigit() and len(given) <= 4):
        return None
    return int(given) if 1 <= int(given) <= MOST_REQUESTS else None


def _wrong_limit(name: str, request: Request) -> Response:
    given = request.query_params[name][:40]
    message = f"{name}: must be an integer of 1 to {MOST_REQUESTS}, found {given!r}"
    return _failure(Failure(400, INVALID, message, param=name))


def _failure(failure: Failure) -> Response:
    headers = {**_HEADERS, "content-type": "application/json"}
    return Response(failure.body(), status_code=failure.status, headers=headers)


def _json(request: Request, page: object) -> Response:
    body = json.dumps(page, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return _tagged(request, body.encode("utf-8", "replace"), "application/json")


def _tagged(request: Request, body: bytes, kind: str) -> Response:
    """304 for who has it already."""
    tag = f'"{xxhash.xxh3_64_hexdigest(body)}"'
    headers = {**_HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "content-type": kind})
