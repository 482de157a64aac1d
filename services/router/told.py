"""What workers say of a leg, as the client's side sees it."""

from __future__ import annotations

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.errors import KvrelayError, RequestError, WorkerFailed
from kvrelay.shared.rpc.convert import finish_from_wire, logprobs_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import LegSpec

ASKED_FIELDS = frozenset({"prompt", "grammar", "logprobs", "prompt_logprobs"})
"""Of a leg, that a worker may find at fault."""


def tells_all(spec: LegSpec, token: pb.Token) -> bool:
    """Whether it comes with all that the leg wants to be told of it."""
    how = spec.sampling
    if how.logprobs is not None and not token.HasField("logprobs"):
        return False
    of_prompt = how.prompt_logprobs is not None and token.index == 0 and len(spec.prompt) > 1
    return not of_prompt or token.HasField("prompt_logprobs")


def token_event(leg: int, token: pb.Token) -> TokenEvent:
    logprobs = None
    if token.HasField("logprobs"):
        [logprobs] = logprobs_from_wire(token.logprobs)
    of_prompt = logprobs_from_wire(token.prompt_logprobs) if token.index == 0 else ()
    finish = finish_from_wire(token.finish)
    return TokenEvent(leg, token.index, token.token, finish, logprobs, of_prompt)


def failure_of(message: str) -> KvrelayError:
    """Of a leg that no worker can go on with. What was asked for is to blame where a worker says it
    of a field of it, as in `grammar: the answer cannot go on`."""
    field, colon, _ = message.partition(": ")
    if colon and field in ASKED_FIELDS:
        return RequestError(message, code="invalid_value")
    return WorkerFailed(message)
