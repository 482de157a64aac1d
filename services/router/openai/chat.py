"""POST /v1/chat/completions: how its answers are worded."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvrelay.services.router.openai.sse import Envelope
from kvrelay.services.router.openai.wording import Choice, Usage
from kvrelay.shared.types import FinishReason, ValidRequest


class ChatWording:
    """`Wording` of /v1/chat/completions.

    The role travels with a choice's first text: an earlier chunk with the role alone would claim a
    first token that is not there. A choice without any text has it in its finish chunk.
    """

    def __init__(self, request: ValidRequest, created_s: int) -> None:
        self._id = f"chatcmpl-{request.request_id}"
        self._created_s = created_s
        self._model = request.model
        kind = "chat.completion.chunk"
        self._envelope = Envelope(self._id, kind, created_s, self._model, request.include_usage)
        self._without_role = set(range(len(request.legs)))

    def delta(self, leg: int, text: str) -> bytes:
        return self._chunk(leg, f'"content": {json.dumps(text)}', "null")

    def finish(self, leg: int, reason: FinishReason) -> bytes:
        content = '"content": ""' if leg in self._without_role else ""
        return self._chunk(leg, content, f'"{reason}"')

    def _chunk(self, leg: int, content: str, finish: str) -> bytes:
        if leg in self._without_role:
            self._without_role.discard(leg)
            content = '"role": "assistant", ' + content
        return self._envelope.chunk(
            f'{{"index": {leg}, "delta": {{{content}}}, "logprobs": null, '
            f'"finish_reason": {finish}}}'
        )

    def usage(self, usage: Usage) -> bytes:
        return self._envelope.usage(json.dumps(usage.as_json()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return json.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created_s,
                "model": self._model,
                "choices": [
                    {
                        "index": leg,
                        "message": {
                            "role": "assistant",
                            "content": choice.text,
                            "refusal": None,
                        },
                        "logprobs": None,
                        "finish_reason": choice.finish,
                    }
                    for leg, choice in enumerate(choices)
                ],
                "usage": usage.as_json(),
            }
        ).encode("ascii")
