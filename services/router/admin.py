"""`GET /admin/legs`: what this router has on its way, for `kvrelay audit`. Ids and counts only.
`POST /admin/drain`: let it go, as SIGTERM does.

Not for clients: they answer who knows the token that the router drew at its start and left in its
record in Redis. So who may read the cluster's Redis may ask, and nobody has to set anything.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay.services.router.openai.errors import INVALID, Failure
from kvrelay.services.router.running import RunningLeg, RunningRequest

LEGS_PATH = "/admin/legs"
DRAIN_PATH = "/admin/drain"
Legs = Iterable[tuple[RunningRequest, RunningLeg]]
Page = Callable[[], dict[str, object]]


def legs_page(router: str, legs: Legs, requests_in_flight: int, queued: int) -> dict[str, object]:
    """`router` as the workers and the ledger know it; the two counts are its gauges."""
    found = [*legs]
    return {
        "router": router,
        "requests_in_flight": requests_in_flight,
        "queued": queued,
        "requests": len({id(running) for running, _ in found}),
        "waiting_legs": sum(leg.queued for _, leg in found),
        "legs": [
            {
                "leg": leg.machine.spec.leg,
                "attempt": leg.machine.attempt,
                "nonce": f"{leg.machine.ref.nonce:x}",
                "stage": leg.machine.stage.value,
                "prefill": leg.machine.prefill_incarnation,
                "decode": leg.machine.decode_incarnation,
                "told": sorted(leg.machine.told),
            }
            for _, leg in found
        ],
    }


def admin_route(token: str, page: Page) -> Route:
    async def legs(request: Request) -> Response:
        return JSONResponse(page(), headers={"cache-control": "no-store"})

    return Route(LEGS_PATH, _guarded(token, legs))


def drain_route(token: str, drain: Callable[[], None]) -> Route:
    async def draining(request: Request) -> Response:
        """Answers at once; what runs has as long as after SIGTERM."""
        drain()
        return JSONResponse({"status": "draining"}, status_code=202)

    return Route(DRAIN_PATH, _guarded(token, draining), methods=["POST"])


Handler = Callable[[Request], Awaitable[Response]]


_NO_TOKEN = Failure(
    401, INVALID, "the token of this router's record in Redis is needed", code="invalid_api_key"
)


def _guarded(token: str, handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            headers = {"content-type": "application/json"}
            return Response(_NO_TOKEN.body(), status_code=_NO_TOKEN.status, headers=headers)
        return await handler(request)

    return guarded
