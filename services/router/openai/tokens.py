"""The routes about tokens alone: /tokenize, /detokenize, /tokenizer_info. Nothing is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvrelay.services.router.openai.errors import closing, failure_of
from kvrelay.services.router.openai.exchange import ClientGone
from kvrelay.services.router.openai.generate import Edge
from kvrelay.services.router.openai.parse import json_object, parse_fields
from kvrelay.services.router.openai.schema import ChatBody, Wire
from kvrelay.services.router.validate import ModelCard, Origin, model_not_found, valid_chat
from kvrelay.shared.errors import KvrelayError, RequestError, Unavailable

MAX_CHARACTERS = 1 << 20
"""Of a text to be taken apart: several times the longest contexts, and about a second's work."""
MAX_IDS = 1 << 18


class TokenizeBody(Wire):
    """A plain text; with `messages` in its place the body is one of /v1/chat/completions."""

    prompt: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Wire):
    tokens: Annotated[list[int], Field(max_length=MAX_IDS)]
    model: str | None = None


Answer = Callable[..., bytes]
"""Of a body, a `ModelCard` and an `Origin`."""


class TokenEndpoint:
    """An ASGI application for one route: a JSON body in, a JSON answer out, large ones off the
    event loop and in turn."""

    def __init__(self, answer: Answer, edge: Edge) -> None:
        self._answer = answer
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin, reply = self._edge.begin(scope, send)
        try:
            try:
                data = await self._answered(scope, receive, origin)
            except KvrelayError as error:
                failure = failure_of(error)
                await reply.whole(failure.status, failure.body(), closing(failure))
            else:
                await reply.whole(200, data)
        except ClientGone:
            return

    async def _answered(self, scope: Scope, receive: Receive, origin: Origin) -> bytes:
        async with self._edge.bodies.json(scope, receive) as body:
            card = self._edge.card()
            if card is None:
                raise Unavailable("No model is being served yet")
            work = partial(self._answer, body, origin=origin)
            return await self._edge.work(work, card, len(body))


def tokenize(body: bytearray, card: ModelCard, origin: Origin) -> bytes:
    """Raises `RequestError`."""
    fields = json_object(body)
    fields.setdefault("model", card.names[0])
    if "messages" in fields and "prompt" not in fields:
        asked = _flags(fields)
        chat = parse_fields(ChatBody, fields)
        ids = list(valid_chat(chat, card, origin).legs[0].prompt)
    else:
        text = parse_fields(TokenizeBody, fields)
        asked = text
        _check_model(text.model, card)
        special = text.add_special_tokens is not False
        ids = card.tokenizer.encode(text.prompt, add_special=special)
    strings = [_text(card, id) for id in ids] if asked.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids}
    return json.dumps({**answer, "token_strs": strings}).encode("ascii")


def _flags(fields: dict[str, Any]) -> TokenizeBody:
    """Takes the fields that are this route's alone out of a chat's."""
    names = ("add_special_tokens", "return_token_strs")
    asked = parse_fields(TokenizeBody, {"prompt": ""} | {n: fields.pop(n, None) for n in names})
    if asked.add_special_tokens:
        raise RequestError(
            "add_special_tokens: a chat's control tokens are those of its template",
            param="add_special_tokens",
            code="unsupported_parameter",
        )
    return asked


def detokenize(body: bytearray, card: ModelCard, origin: Origin) -> bytes:
    """Raises `RequestError`."""
    wire = parse_fields(DetokenizeBody, json_object(body))
    _check_model(wire.model, card)
    for at, id in enumerate(wire.tokens):
        if not 0 <= id < card.vocab_size:
            shown = str(id) if abs(id) < 10**30 else "a number of over 30 digits"
            raise RequestError(
                f"tokens: token ids go from 0 to {card.vocab_size - 1} (given: {shown})",
                param=f"tokens[{at}]",
                code="invalid_value",
            )
    return json.dumps({"prompt": card.tokenizer.decode(wire.tokens)}).encode("ascii")


def _check_model(name: str | None, card: ModelCard) -> None:
    if name is not None and name not in card.names:
        raise model_not_found(name)


def _text(card: ModelCard, id: int) -> str:
    return card.tokenizer.token_bytes(id).decode("utf-8", "replace")


def tokenizer_info(card: Callable[[], ModelCard | None]) -> Callable[[Request], Any]:
    async def info(request: Request) -> JSONResponse:
        """What the served model's tokenizer is. Raises `Unavailable`."""
        served = card()
        if served is None:
            raise Unavailable("No model is being served yet")
        special = served.tokenizer.special
        return JSONResponse(
            {
                "model": served.names[0],
                "identity": served.tokenizer.identity,
                "vocab_size": served.vocab_size,
                "max_model_len": served.max_model_len,
                "bos_token": special.bos_token,
                "eos_token": special.eos_token,
                "eos_token_ids": list(special.eos_token_ids),
                "add_bos_token": special.add_bos,
                "special_token_ids": sorted(served.tokenizer.special_ids),
                "chat_template": special.chat_template,
            }
        )

    return info
