"""The seam between the HTTP edge and the cluster: a valid request in, one event stream out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.shared.types import FinishReason, Logprobs, ValidRequest


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The next token of one leg, exactly once and in order of `index`.

    A token that ended the leg by id (EOS or a stop id) arrives with `finish` STOP and is not text;
    one that completes what a grammar wants arrives with it, too, and is text.
    `finish` LENGTH may accompany the last ordinary token.
    """

    leg: int
    index: int
    token: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    """If the request wants them."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """With each leg's first token (index 0), if the request wants them: of prompt tokens 1, 2, ...
    Only the first choice of a prompt asks a worker for them."""


class Generation(Protocol):
    """One running request. Iterate it to its end; a failure is raised from that.

    Raises any `KvrelayError`: before the first event an HTTP status, later an error event.
    """

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computed for this request, each prompt counted once; final
        once it is closed."""
        ...

    def timing_ms(self) -> dict[str, float]:
        """Where the time went, for those who asked; final once it is closed."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    def stop_leg(self, leg: int) -> None:
        """The text of this leg is whole (stop string): no more events of it are wanted."""
        ...

    async def aclose(self) -> None:
        """The client is gone or all is done. Idempotent; frees all that the request holds."""
        ...


@dataclass(frozen=True, slots=True)
class Readiness:
    serves: bool
    """Whether a request would be answered now."""
    missing: str
    """What it lacks to be answered as it is meant to be; empty for nothing."""


class Cluster(Protocol):
    """What the HTTP edge needs from the rest of the router."""

    def generate(self, request: ValidRequest) -> Generation: ...

    def readiness(self) -> Readiness: ...
