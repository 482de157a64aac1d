"""Random bodies, known by their numbers: never a 500, a hang, or an answer that is not documented.

`KVRELAY_TEST_BODIES=20000` for a night, `KVRELAY_TEST_FIRST=N` with 1 for one of them again.
"""

from __future__ import annotations

import os
import random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.unit.edge.fuzzing import Asked, Judge, script

FIRST = int(os.environ.get("KVRELAY_TEST_FIRST", "0"))
JSON = b"application/json"
BODIES = int(os.environ.get("KVRELAY_TEST_BODIES", "1500"))


async def test_no_body_gets_an_answer_that_is_not_documented(
    app: FastAPI, client: httpx.AsyncClient, cluster: Any
) -> None:
    judge = Judge(app, (await client.get("/openapi.json")).json())
    for number in range(FIRST, FIRST + BODIES):
        cluster.script = script(cluster, random.Random(number))
        cluster.requests.clear()
        cluster.generations.clear()
        await judge.ask(Asked.of(number))
        assert all(generation.closes == 1 for generation in cluster.generations)
    if BODIES > 1000:
        assert {200, 400, 404, 429, 503, 504} <= judge.statuses.keys()
        assert min(judge.statuses[200], judge.statuses[400]) > BODIES // 10


async def test_the_judge_refuses_what_a_document_does_not_tell(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    document = (await client.get("/openapi.json")).json()
    asked = Asked(0, "POST", "/detokenize", b'{"tokens": [1]}', ((b"content-type", JSON),))
    assert await Judge(app, document).ask(asked) == 200
    del document["components"]["schemas"]["Text"]["properties"]["prompt"]
    with pytest.raises(AssertionError, match="prompt"):
        await Judge(app, document).ask(asked)
    del document["paths"]["/detokenize"]["post"]["responses"]["200"]
    with pytest.raises(AssertionError, match="-> 200, which is not documented"):
        await Judge(app, document).ask(asked)
