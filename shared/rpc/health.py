"""The standard gRPC health service of a worker, answered by what it is doing now.

Two services can be asked about: "" (all of the process: its engine makes progress) and the relay's
own, `kvrelay.v1.Worker` (it can be given work now: that, and its lease is registered).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WORKER_SERVICE: Final = "kvrelay.v1.Worker"
WATCH_S: Final = 0.25
"""Between two looks for somebody who watches."""

Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Request, Response]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """`services`: of each name, whether it is well now."""

    def __init__(self, services: Mapping[str, Callable[[], bool]]) -> None:
        self._services = services

    async def Check(self, request: Request, context: Context) -> Response:
        if request.service not in self._services:
            known = ", ".join(repr(name) for name in self._services)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service: {request.service!r} is none of {known}"
            )
        return self._answer(request.service)

    async def Watch(self, request: Request, context: Context) -> AsyncIterator[Response]:
        """The status now, and whenever it is another."""
        told = None
        while True:
            if (answer := self._answer(request.service)) != told:
                told = answer
                yield answer
            await asyncio.sleep(WATCH_S)

    def _answer(self, service: str) -> Response:
        well = self._services.get(service)
        if well is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.SERVING if well() else Response.NOT_SERVING)
