"""The one error tree: foreign errors are mapped onto it at each adapter, it at each edge."""

from __future__ import annotations


class KvrelayError(Exception):
    """Any failure that has a name. `str(error)` is a one-line message fit for a person."""


class ConfigError(KvrelayError):
    """A setting, model folder or file that cannot work; the message names it and the limit."""


class ModelError(ConfigError):
    """A model that is missing, unreadable, damaged, or of a family that is not supported."""


class RequestError(KvrelayError):
    """A client's mistake: becomes a 4xx with OpenAI's `code` and the `param` it is about."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class BadGrammar(KvrelayError):
    """What an answer should be cannot be enforced, or a token that it has is not allowed by it."""


class Overloaded(KvrelayError):
    """No room now: becomes a 429 whose Retry-After is `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KvrelayError):
    """No worker can serve this now: becomes a 503."""


class DeadlineExceeded(KvrelayError):
    """A phase ran past its deadline: becomes a 504, or an error event once tokens have flowed."""


class WorkerFailed(KvrelayError):
    """A worker could not go on with a leg, and no other worker could continue it."""


class TokenConflict(WorkerFailed):
    """Two workers gave one output index different tokens: the answer is void, and one of them is
    not what its fingerprint says."""


class TransferError(KvrelayError):
    """The relay between two workers failed; the leg can be continued elsewhere."""


class PeerLost(TransferError):
    """The peer of a transfer is gone or does not answer."""


class CorruptFrame(TransferError):
    """Bytes that are not what their header says: wrong magic, version, range, size or checksum."""


class StoreError(KvrelayError):
    """Redis is away or answered with an error."""


class IllegalMove(KvrelayError):
    """A state change that the lifecycle does not have: a defect, never a user's mistake."""
