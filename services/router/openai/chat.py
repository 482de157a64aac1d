"""POST /v1/chat/completions: how its answers are worded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvrelay.services.router.openai.logprobs import chat_logprobs, prompt_logprobs
from kvrelay.services.router.openai.message import Fields, message_of, parser_of
from kvrelay.services.router.openai.sse import Envelope
from kvrelay.services.router.openai.wording import Choice, Delta, Timing, Told, Usage
from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.types import Logprobs, ValidRequest


class ChatWording:
    """`Wording` of /v1/chat/completions.

    The role travels with a choice's first text: an earlier chunk with the role alone would claim a
    first token that is not there. A choice without any text has it in its finish chunk, and one
    with neither content nor calls has its empty content there, as in a whole answer.
    """

    def __init__(self, request: ValidRequest, card: ModelCard, created_s: int) -> None:
        self._id = f"chatcmpl-{request.request_id}"
        self._created_s = created_s
        self._request = request
        self._tokenizer = card.tokenizer
        kind = "chat.completion.chunk"
        self._envelope = Envelope(self._id, kind, created_s, request.model, request.include_usage)
        self._parsers = [parser_of(request, leg) for leg in range(len(request.legs))]
        self._waiting: list[list[Told]] = [[] for _ in request.legs]
        """Tokens whose text a parser holds back."""
        self._without_role = set(range(len(request.legs)))
        self._without_content = set(self._without_role)
        """Nor calls."""
        self._prompt_due: tuple[Logprobs, ...] | None = None
        """Of the prompt, for the first chunk of all."""
        self._begun = False

    def chunk(self, leg: int, delta: Delta, so_far: Usage | None = None) -> bytes:
        """Several chunks when a parser tells several fields, as of text that it held back."""
        parser = self._parsers[leg]
        fields = parser.feed(delta.text) if delta.text else ()
        self._waiting[leg] += delta.tokens
        if not self._begun and delta.prompt_logprobs is not None:
            self._prompt_due = delta.prompt_logprobs
        usage = "" if so_far is None else json.dumps(so_far.so_far())
        data = b"".join([self._piece(leg, one, None, usage) for one in fields])
        if delta.finish is None:
            return data
        held, reason = parser.finish(delta.finish)
        data += b"".join([self._piece(leg, one, None, usage) for one in held])
        last = {"content": ""} if leg in self._without_content else {}
        return data + self._piece(leg, last, reason, usage)

    def _piece(self, leg: int, fields: Fields, finish: str | None, usage: str) -> bytes:
        if leg in self._without_role:
            self._without_role.discard(leg)
            nothing = {"content": None} if "tool_calls" in fields else {}
            fields = {"role": "assistant", **nothing, **fields}
        if "content" in fields or "tool_calls" in fields:
            self._without_content.discard(leg)
        told, self._waiting[leg] = self._waiting[leg], []
        choice: dict[str, Any] = {
            "index": leg,
            "delta": fields,
            "logprobs": self._logprobs(told) if told else None,
            "finish_reason": finish,
        }
        if self._request.form.token_ids:
            choice["token_ids"] = [one.token for one in told]
        extra = ""
        if not self._begun:
            self._begun = True
            extra = json.dumps(self._prompt(self._prompt_due or ()))[1:-1]
        return self._envelope.chunk(json.dumps(choice), usage, extra)

    def _logprobs(self, told: Sequence[Told]) -> dict[str, Any] | None:
        top = self._request.form.logprobs
        return None if top is None else chat_logprobs(told, top, self._tokenizer)

    def _prompt(self, logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """What is told of the prompt, which all choices share."""
        form, prompt = self._request.form, self._request.legs[0].prompt
        fields: dict[str, Any] = {}
        if form.prompt_logprobs is not None:
            top = form.prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(prompt, logprobs, top, self._tokenizer)
        if form.token_ids:
            fields["prompt_token_ids"] = prompt
        return fields

    def last(self, usage: Usage | None, timing: Timing) -> bytes:
        told = "" if usage is None else json.dumps(usage.as_json())
        return self._envelope.last(told, json.dumps(timing) if timing else "")

    def whole(self, choices: Sequence[Choice], usage: Usage, timing: Timing) -> bytes:
        return json.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created_s,
                "model": self._request.model,
                "choices": [
                    self._choice(index, leg, answer) for index, (leg, answer) in enumerate(choices)
                ],
                "usage": usage.as_json(),
                **({"kvrelay_timing": timing} if timing else {}),
                **self._prompt(choices[0].answer.prompt_logprobs or ()),
            }
        ).encode("ascii")

    def _choice(self, index: int, leg: int, answer: Delta) -> dict[str, Any]:
        parser = self._parsers[leg]
        fields = parser.feed(answer.text) if answer.text else ()
        assert answer.finish is not None, "the leg has ended"
        held, reason = parser.finish(answer.finish)
        choice: dict[str, Any] = {
            "index": index,
            "message": message_of([*fields, *held]),
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": reason,
        }
        if self._request.form.token_ids:
            choice["token_ids"] = [told.token for told in answer.tokens]
        return choice
