"""A worker's token and what is told of it, as the client's side sees them."""

from __future__ import annotations

from kvrelay.services.router.generation import TokenEvent
from kvrelay.shared.rpc.convert import finish_from_wire, logprobs_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import LegSpec


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
