"""POST /v1/completions: how its answers are worded."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvrelay.services.router.openai.sse import Envelope
from kvrelay.services.router.openai.wording import Choice, Usage
from kvrelay.shared.types import FinishReason, ValidRequest

KIND = "text_completion"


class CompletionWording:
    """`Wording` of /v1/completions."""

    def __init__(self, request: ValidRequest, created_s: int) -> None:
        self._id = f"cmpl-{request.request_id}"
        self._created_s = created_s
        self._model = request.model
        self._envelope = Envelope(self._id, KIND, created_s, self._model, request.include_usage)

    def delta(self, leg: int, text: str) -> bytes:
        return self._chunk(leg, text, "null")

    def finish(self, leg: int, reason: FinishReason) -> bytes:
        return self._chunk(leg, "", f'"{reason}"')

    def _chunk(self, leg: int, text: str, finish: str) -> bytes:
        return self._envelope.chunk(
            f'{{"index": {leg}, "text": {json.dumps(text)}, "logprobs": null, '
            f'"finish_reason": {finish}}}'
        )

    def usage(self, usage: Usage) -> bytes:
        return self._envelope.usage(json.dumps(usage.as_json()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return json.dumps(
            {
                "id": self._id,
                "object": KIND,
                "created": self._created_s,
                "model": self._model,
                "choices": [
                    {
                        "index": leg,
                        "text": choice.text,
                        "logprobs": None,
                        "finish_reason": choice.finish,
                    }
                    for leg, choice in enumerate(choices)
                ],
                "usage": usage.as_json(),
            }
        ).encode("ascii")
