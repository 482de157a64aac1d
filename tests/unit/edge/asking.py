"""How the tests of the two generating routes ask them."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


async def whole(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def chunks(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The parsed events of a stream, which must end with [DONE]."""
    response = await client.post(path, json=BODIES[path] | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
