"""What others can ask about a worker's health, over HTTP and gRPC: alive, and able to serve now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.shared.rpc.health import WORKER_SERVICE, HealthServicer

ANSWER_S: Final = 1.0
"""An event loop that takes longer to answer counts as one that does not."""

Ailment = Callable[[bool], str]
"""On the event loop: why the worker is not alive or, asked with True, cannot be given work now;
empty if neither."""


def http_probes(
    loop: asyncio.AbstractEventLoop, ailment: Ailment
) -> Mapping[str, Callable[[], str]]:
    """Of `/health` and `/ready`: what is wrong. Called on other threads than the loop's."""

    def ask(able: bool) -> str:
        async def now() -> str:
            return ailment(able)

        answer = asyncio.run_coroutine_threadsafe(now(), loop)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            return f"the event loop did not answer within {ANSWER_S:g} s"

    return {"/health": lambda: ask(False), "/ready": lambda: ask(True)}


def grpc_health(ailment: Ailment) -> HealthServicer:
    return HealthServicer(
        {"": lambda: not ailment(False), WORKER_SERVICE: lambda: not ailment(True)}
    )
