"""Counts the requests that never became one: the HTTP edge refused them."""

from __future__ import annotations

from kvrelay.services.router.openai.observer import Unobserved
from kvrelay.shared.telemetry.labels import Endpoint, Outcome
from kvrelay.shared.telemetry.metrics import RouterMetrics


class RefusalCounter(Unobserved):
    """An `EdgeObserver`. Accepted requests are reported by their `RequestWatch`, once each."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def errored(self, route: str, status: int, taken: bool) -> None:
        if not taken:
            endpoint = Endpoint.CHAT if "chat" in route else Endpoint.COMPLETIONS
            self._metrics.request_refused(endpoint, refusal(status))


def refusal(status: int) -> Outcome:
    if status == 429:
        return Outcome.OVERLOADED
    if status < 500:
        return Outcome.BAD_REQUEST
    return Outcome.UNAVAILABLE if status == 503 else Outcome.FAILED
