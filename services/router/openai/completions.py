"""POST /v1/completions: how its answers are worded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvrelay.services.router.openai.logprobs import completion_logprobs, prompt_logprobs
from kvrelay.services.router.openai.sse import Envelope
from kvrelay.services.router.openai.wording import Choice, Delta, Timing, Usage
from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.types import ValidRequest

KIND = "text_completion"


class CompletionWording:
    """`Wording` of /v1/completions."""

    def __init__(self, request: ValidRequest, card: ModelCard, created_s: int) -> None:
        self._id = f"cmpl-{request.request_id}"
        self._created_s = created_s
        self._request = request
        self._tokenizer = card.tokenizer
        self._envelope = Envelope(self._id, KIND, created_s, request.model, request.include_usage)

    def chunk(self, leg: int, delta: Delta, so_far: Usage | None = None) -> bytes:
        choice = json.dumps(self._choice(leg, leg, delta))
        return self._envelope.chunk(choice, "" if so_far is None else json.dumps(so_far.so_far()))

    def _choice(self, index: int, leg: int, delta: Delta) -> dict[str, Any]:
        """The same for a piece and for the whole."""
        form, prompt = self._request.form, self._request.legs[leg].prompt
        told = delta.echoed + delta.tokens
        logprobs = None
        if form.logprobs is not None and told:
            logprobs = completion_logprobs(told, form.logprobs, self._tokenizer)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        first = delta.prompt_logprobs
        if form.token_ids:
            choice["token_ids"] = [told.token for told in delta.tokens]
            if first is not None:
                choice["prompt_token_ids"] = prompt
        if form.prompt_logprobs is not None and first is not None:
            top = form.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(prompt, first, top, self._tokenizer)
        return choice

    def last(self, usage: Usage | None, timing: Timing) -> bytes:
        told = "" if usage is None else json.dumps(usage.as_json())
        return self._envelope.last(told, json.dumps(timing) if timing else "")

    def whole(self, choices: Sequence[Choice], usage: Usage, timing: Timing) -> bytes:
        return json.dumps(
            {
                "id": self._id,
                "object": KIND,
                "created": self._created_s,
                "model": self._request.model,
                "choices": [
                    self._choice(index, leg, answer) for index, (leg, answer) in enumerate(choices)
                ],
                "usage": usage.as_json(),
                **({"kvrelay_timing": timing} if timing else {}),
            }
        ).encode("ascii")
