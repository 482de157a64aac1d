"""The error tree as HTTP: one table, one body shape, on every route and inside streams."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from kvrelay.services.router.appointments import LONGEST_S
from kvrelay.shared.errors import (
    DeadlineExceeded,
    KvrelayError,
    Overloaded,
    RequestError,
    Unavailable,
)

INVALID, LIMITED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"

TABLE: tuple[tuple[type[KvrelayError], int, str, str], ...] = (
    (Overloaded, 429, LIMITED, "rate_limit_exceeded"),
    (Unavailable, 503, SERVER, "service_unavailable"),
    (DeadlineExceeded, 504, SERVER, "deadline_exceeded"),
    (KvrelayError, 500, SERVER, "internal_error"),
)
"""First match wins. Status, type and code of what is not the client's mistake."""

INTERNAL = "The server failed while it handled this request"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        """OpenAI's error object, in ASCII, so that no client's decoder can trip over it."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode("ascii")


def closing(failure: Failure) -> tuple[tuple[str, str], ...]:
    """The failure's headers, and the end of the connection when the body was not read in time.

    Not for 413: closing on unread data resets the connection, and the answer is lost. The server
    reads on without keeping anything.
    """
    close = (("connection", "close"),) if failure.status == 408 else ()
    return (*failure.headers, *close)


def failure_of(error: KvrelayError) -> Failure:
    """What a client is told. Failures inside the cluster keep their details to the logs."""
    if isinstance(error, RequestError):
        return Failure(error.status, INVALID, str(error), error.param, error.code)
    status, kind, code = next(row[1:] for row in TABLE if isinstance(error, row[0]))
    headers = _retry_after(error.retry_after_s) if isinstance(error, Overloaded) else ()
    message = INTERNAL if status == 500 else str(error)
    return Failure(status, kind, message, code=code, headers=headers)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    """In whole seconds, as HTTP has it, and exactly, as OpenAI's clients read it: these wait for a
    minute at most, and are told what is left of a longer time when they come again."""
    milliseconds = max(1, math.ceil(seconds * 1000))
    return (
        ("retry-after", str(math.ceil(milliseconds / 1000))),
        ("retry-after-ms", str(min(milliseconds, LONGEST_S * 1000))),
    )


def failure_of_route(status: int, detail: str, headers: dict[str, str]) -> Failure:
    """No such route (404) or method (405)."""
    return Failure(status, INVALID, detail, headers=tuple(headers.items()))


def no_key(*, missing: bool) -> Failure:
    """A request without one of the API keys. The wrong key is not repeated to anybody."""
    message = (
        "No API key was given: send it as 'Authorization: Bearer KEY'"
        if missing
        else "The API key is not one of this server's"
    )
    headers = (("www-authenticate", "Bearer"),)
    return Failure(401, INVALID, message, code="invalid_api_key", headers=headers)
