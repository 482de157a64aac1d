"""The router's HTTP application."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay import __version__
from kvrelay.services.router.gate import Gate, Places
from kvrelay.services.router.generation import Cluster
from kvrelay.services.router.openai.errors import (
    INTERNAL,
    SERVER,
    Failure,
    failure_of,
    failure_of_route,
)
from kvrelay.services.router.openai.exchange import Bodies
from kvrelay.services.router.openai.generate import (
    CHAT,
    COMPLETIONS,
    Draws,
    Edge,
    EdgeSettings,
    GenerateEndpoint,
)
from kvrelay.services.router.openai.models import Models
from kvrelay.services.router.openai.observer import EdgeObserver, Unobserved
from kvrelay.services.router.openai.openapi import openapi_document
from kvrelay.services.router.openai.tokens import (
    TokenEndpoint,
    detokenize,
    tokenize,
    tokenizer_info,
)
from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.types import MAX_SEED

GATHERING_NS = 30 * 10**9
"""Parts that start together have found each other by then: until all have, a router is not ready.
After that it is as long as it can answer, because a prefill worker that is lost slows answers down
and stops none."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def random_draws() -> Draws:
    """Ids and seeds from the system's randomness, time from its clock."""
    return Draws(
        request_id=lambda: secrets.token_hex(16),
        seed=lambda: secrets.randbelow(MAX_SEED + 1),
        wall_s=lambda: int(time.time()),
        now_ns=time.monotonic_ns,
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """What others know and these routes show."""

    metrics: Callable[[], bytes] | None = None
    """In Prometheus' text; None when it is on another port."""
    queued: Callable[[], int] = int
    """Requests that wait for their first token."""


def create_app(
    cluster: Cluster,
    card: Callable[[], ModelCard | None],
    settings: EdgeSettings | None = None,
    observer: EdgeObserver | None = None,
    pages: Pages | None = None,
    draws: Draws | None = None,
) -> FastAPI:
    """`card` gives the model being served, None while there is none."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    settings, draws, pages = settings or EdgeSettings(), draws or random_draws(), pages or Pages()
    places = Places(settings.gate.max_requests, draws.now_ns)
    edge = Edge(
        cluster=cluster,
        card=card,
        settings=settings,
        observer=observer or Unobserved(),
        draws=draws,
        bodies=Bodies(settings.body),
        large=asyncio.Semaphore(settings.large_at_once),
    )
    models = Models(card)
    app.router.routes += [
        Route(COMPLETIONS.path, GenerateEndpoint(COMPLETIONS, edge), methods=["POST"]),
        Route(CHAT.path, GenerateEndpoint(CHAT, edge), methods=["POST"]),
        Route("/v1/models", models.all),
        Route("/v1/models/{name:path}", models.one),
        Route("/tokenize", TokenEndpoint(tokenize, edge), methods=["POST"]),
        Route("/detokenize", TokenEndpoint(detokenize, edge), methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info(card)),
        Route("/version", _version),
        Route("/load", _load(places, pages.queued)),
        Route("/openapi.json", _document(pages, settings.gate.keys.wanted)),
        *_probes(cluster, draws.now_ns),
    ]
    if pages.metrics is not None:
        app.router.routes.append(Route("/metrics", _metrics(pages.metrics)))
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Gate, rules=settings.gate, places=places, request_id=draws.request_id)
    return app


def create_admin_app(
    cluster: Cluster, metrics: Callable[[], bytes], routes: Sequence[Route]
) -> Starlette:
    """For a port that clients do not reach: probes, metrics, and `routes` with their own guard."""
    own = [*_probes(cluster, time.monotonic_ns), Route("/metrics", _metrics(metrics)), *routes]
    return Starlette(routes=own, exception_handlers=_HANDLERS)


def _probes(cluster: Cluster, now_ns: Callable[[], int]) -> list[Route]:
    return [Route("/health", _health), Route("/ready", _ready(cluster, now_ns))]


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


def _load(places: Places, queued: Callable[[], int]) -> Callable[[Request], Awaitable[Response]]:
    async def load(request: Request) -> Response:
        """This one is not counted; all that waits or runs is."""
        return JSONResponse({"server_load": places.taken - 1, "queued": queued()})

    return load


def _document(pages: Pages, with_keys: bool) -> Callable[[Request], Awaitable[Response]]:
    with_metrics = pages.metrics is not None
    made = cache(partial(openapi_document, with_metrics=with_metrics, with_keys=with_keys))

    async def openapi(request: Request) -> Response:
        return JSONResponse(made())

    return openapi


async def _health(request: Request) -> Response:
    """The process answers. Whether it can serve is `/ready`."""
    return JSONResponse({"status": "ok"})


def _ready(cluster: Cluster, now_ns: Callable[[], int]) -> Callable[[Request], Awaitable[Response]]:
    born_ns = now_ns()

    async def ready(request: Request) -> Response:
        found = cluster.readiness()
        if not found.missing:
            return JSONResponse({"status": "ready"})
        able = found.serves and now_ns() - born_ns > GATHERING_NS
        body = {"status": "degraded" if able else "not ready", "reason": found.missing}
        return JSONResponse(body, status_code=200 if able else 503)

    return ready


def _metrics(text: Callable[[], bytes]) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        return Response(text(), headers={"content-type": METRICS_TYPE})

    return metrics


def _response(failure: Failure) -> Response:
    headers = {"content-type": "application/json", **dict(failure.headers)}
    return Response(failure.body(), status_code=failure.status, headers=headers)


async def _on_route_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    known = {404: "No such path", 405: "This path does not take that method"}
    message = f"{known.get(error.status_code, error.detail)}: {request.method} {request.url.path!a}"
    return _response(failure_of_route(error.status_code, message, dict(error.headers or {})))


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, KvrelayError):
        raise error
    return _response(failure_of(error))


async def _on_defect(request: Request, error: Exception) -> Response:
    """Answers for the server; the error itself is raised on and logged by it."""
    return _response(Failure(500, SERVER, INTERNAL, code="internal_error"))


_HANDLERS: Mapping[Any, Any] = {
    HTTPException: _on_route_error,
    KvrelayError: _on_error,
    Exception: _on_defect,
}
