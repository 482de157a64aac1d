"""`GET /admin/legs`: what this router has on its way, for `kvrelay audit`. Ids and counts only.

Not for clients: it answers who knows the token that the router drew at its start and left in its
record in Redis. So who may read the cluster's Redis may ask, and nobody has to set anything.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay.services.router.running import RunningLeg, RunningRequest

PATH = "/admin/legs"
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
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            message = "the token of this router's record in Redis is needed"
            return JSONResponse({"error": {"message": message}}, status_code=401)
        return JSONResponse(page(), headers={"cache-control": "no-store"})

    answer: Callable[[Request], Awaitable[Response]] = legs
    return Route(PATH, answer)
