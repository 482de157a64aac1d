"""What the HTTP edge tells whoever measures it."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from kvrelay.services.router.openai.wording import Usage
from kvrelay.shared.types import ValidRequest


class Outcome(StrEnum):
    """How an accepted request ended; exactly one each."""

    FINISHED = "finished"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"


class EdgeObserver(Protocol):
    """Called on the event loop; must not block or raise."""

    def errored(self, route: str, status: int, taken: bool) -> None:
        """An error status was answered: before the cluster had taken the request, or (`taken`)
        before its answer's first byte."""
        ...

    def accepted(self, request: ValidRequest) -> None: ...

    def first_byte(self, request: ValidRequest) -> None:
        """The first byte of the answer was handed to the connection."""
        ...

    def ended(self, request: ValidRequest, outcome: Outcome, usage: Usage) -> None: ...


class Unobserved:
    """Nobody measures."""

    def errored(self, route: str, status: int, taken: bool) -> None:
        pass

    def accepted(self, request: ValidRequest) -> None:
        pass

    def first_byte(self, request: ValidRequest) -> None:
        pass

    def ended(self, request: ValidRequest, outcome: Outcome, usage: Usage) -> None:
        pass
