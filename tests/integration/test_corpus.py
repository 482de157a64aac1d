"""Requests drawn over all fields of both routes: each is answered the same in four ways, split or
not and streamed or not, field by field; and streamed while the worker that writes it is killed.

`KVRELAY_TEST_REQUESTS=300` for a night, `KVRELAY_TEST_FIRST=N` with 1 for one of them again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import httpx
import pytest
from tests.integration.corpus import TEXT, Drawn, drawn, thoughtful
from tests.integration.joining import differences, joined
from tests.integration.test_failover import OUTPUTS, busy, lost, retries
from tests.stack import Stack, until

from kvrelay.services.router.openai.schema import ChatBody, CompletionBody

FIRST = int(os.environ.get("KVRELAY_TEST_FIRST", "0"))
REQUESTS = int(os.environ.get("KVRELAY_TEST_REQUESTS", "60"))
BATCH = 60
BATCHES = [
    range(at, min(at + BATCH, FIRST + REQUESTS)) for at in range(FIRST, FIRST + REQUESTS, BATCH)
]
AT_ONCE = 6
LONG = 3
"""One of so many has a long answer, in the midst of which a worker is killed."""
ROUNDS = 3
"""Who computes beside the tests may let a kill come too late."""
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
OWN = frozenset({"id", "created", "object"})
"""What each answer has of its own; a stream's chunks are called otherwise, too."""

batches = pytest.mark.parametrize("numbers", BATCHES, ids=lambda batch: f"{batch[0]}-{batch[-1]}")


def requests(numbers: Sequence[int]) -> list[Drawn]:
    return [drawn(number, long=number % LONG == 0) for number in numbers]


# ---- one request, one way ------------------------------------------------------------------------


def whole(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name != "stream_options"}
    response = stack.post(path, **body)
    assert response.status_code == 200, f"{response.text} to {body}"
    return compared(strict(response.text))


def streamed(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Of several candidates all are streamed, and the best chosen here."""
    n, candidates = body.get("n", 1), body.get("best_of", 1)
    if candidates <= n:
        return compared(joined(chunks(stack, path, body)))
    hidden = body.get("logprobs") is None
    every = {**body, "n": candidates, "logprobs": 0 if hidden else body["logprobs"]}
    answer = compared(joined(chunks(stack, path, every)))
    return {**answer, "choices": best(answer["choices"], n, candidates, hidden)}


def best(choices: list[Any], n: int, candidates: int, hidden: bool) -> list[Any]:
    """Of each prompt the likeliest, renumbered."""

    def logprob(choice: dict[str, Any]) -> float:
        return -sum(one or 0 for one in (choice["logprobs"] or {}).get("token_logprobs", ()))

    kept: list[Any] = []
    for first in range(0, len(choices), candidates):
        kept += sorted(choices[first : first + candidates], key=logprob)[:n]
    more = {"logprobs": None} if hidden else {}
    return [{**choice, "index": index, **more} for index, choice in enumerate(kept)]


def chunks(stack: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": stack.model, **body, "stream": True}
    with stack.http.stream("POST", f"{stack.url}{path}", json=body) as stream:
        assert stream.status_code == 200, f"{stream.read()!r} to {body}"
        data = [line for line in stream.iter_lines() if line]
    assert data[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in data), data[-1]
    found = [strict(line.removeprefix("data: ")) for line in data[:-1]]
    assert not any("error" in chunk for chunk in found), found[-1]
    check_usage(found, body.get("stream_options") or {})
    return found


def check_usage(found: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """It is told where it was asked for, and grows."""
    *before, last = found
    asked = bool(options.get("include_usage"))
    running = bool(options.get("continuous_usage_stats"))
    assert (not last["choices"]) == asked, "usage comes last and alone"
    assert bool(last.get("usage")) == (asked or running)
    assert all(bool(chunk.get("usage")) == running for chunk in before)
    if running:
        totals = [[chunk["usage"][count] for count in COUNTS] for chunk in found]
        assert all(one[0] == other[0] and one <= other for one, other in pairwise(totals))
        assert totals[-1] == totals[-1 - asked], "and ends where the answer does"


def strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    answer: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return answer


def compared(answer: dict[str, Any]) -> dict[str, Any]:
    """What must be the same however it was asked."""
    answer = {name: value for name, value in answer.items() if name not in OWN}
    if "usage" in answer:
        usage = answer["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        assert 0 <= cached <= usage["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        answer["usage"] = {count: usage[count] for count in COUNTS}
    ids = [
        call.pop("id")
        for choice in answer["choices"]
        for call in choice.get("message", {}).get("tool_calls", ())
    ]
    assert len({*ids}) == len(ids) and all(id.startswith("call_") for id in ids), ids
    return answer


# ---- all of them ---------------------------------------------------------------------------------


def asked_body(unsplit: Stack, request: Drawn) -> dict[str, Any]:
    """With its stops cut from what the answer is without them."""
    if not request.tries:
        return request.body
    [choice, *_] = whole(unsplit, request.path, request.tried())["choices"]
    message = choice.get("message", {})
    called = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    text = choice["text"] if "text" in choice else (message["content"] or "".join(called))
    return request.stopped(text, choice["token_ids"])


def told(request: Drawn, way: str, answer: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """How it differs from the reference; what a stream was not asked to tell aside."""
    reference = {
        name: value for name, value in reference.items() if name in answer or name != "usage"
    }
    return [f"{request.number} {way}{one}" for one in differences(answer, reference)]


def four_ways(split: Stack, unsplit: Stack, request: Drawn) -> tuple[dict[str, Any], list[str]]:
    """The answer, and where it was another one."""
    body = asked_body(unsplit, request)
    reference = whole(unsplit, request.path, body)
    ways: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
        "unsplit, streamed": partial(streamed, unsplit),
        "split": partial(whole, split),
        "split, streamed": partial(streamed, split),
    }
    found = []
    for way, ask in ways.items():
        try:
            found += told(request, way, ask(request.path, body), reference)
        except (AssertionError, httpx.HTTPError) as error:
            found.append(f"{request.number} {way}: {error}")
    return reference, found


@batches
def test_the_same_answer_in_four_ways(split: Stack, unsplit: Stack, numbers: range) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [*pool.map(partial(four_ways, split, unsplit), requests(numbers))]
    different = [one for _, several in found for one in several]
    assert not different, "\n".join(different)


def test_reasoning_is_the_same_in_four_ways(split: Stack, unsplit: Stack) -> None:
    numbers = range(FIRST, FIRST + max(1, REQUESTS // 3))
    with (
        split.behind("thinking", reasoning_parser="think") as one,
        unsplit.behind("thinking", reasoning_parser="think") as other,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        found = [*pool.map(partial(four_ways, one, other), map(thoughtful, numbers))]
    different = [one for _, several in found for one in several]
    assert not different, "\n".join(different)
    messages = [choice["message"] for answer, _ in found for choice in answer["choices"]]
    thought = sum("reasoning_content" in message for message in messages)
    called = sum("tool_calls" in message for message in messages)
    print(f"{len(messages)} choices, {thought} with reasoning and {called} with calls")
    assert FIRST or REQUESTS < BATCH or (thought and called)


@pytest.mark.leaks_allowed
@batches
def test_the_same_answer_though_its_decode_worker_is_killed(
    tcp: Stack, unsplit: Stack, numbers: range
) -> None:
    asked = [request for request in requests(numbers) if request.number % LONG == 0]
    with ThreadPoolExecutor(len(asked)) as pool:
        bodies = [*pool.map(partial(asked_body, unsplit), asked)]
        paths = [request.path for request in asked]
        references = [*pool.map(partial(whole, unsplit), paths, bodies)]
    for _ in range(ROUNDS):
        answers, continued = through_a_death(tcp, paths, bodies)
        different = [
            one
            for request, answer, reference in zip(asked, answers, references, strict=True)
            for one in told(request, "killed", answer, reference)
        ]
        assert not different, "\n".join(different)
        print(f"{len(asked)} streams, {continued:g} legs of them continued")
        if continued >= len(asked) / 4:
            return
    raise AssertionError("each time nearly all answers were whole before the worker died")


def through_a_death(
    stack: Stack, paths: Sequence[str], bodies: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], float]:
    """All of them streamed at the same time while a worker that decodes is killed, and how many
    legs went on elsewhere."""
    before = retries(stack)
    enough = stack.counted(stack.decodes, OUTPUTS) + 8 * len(bodies)
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [
            pool.submit(streamed, stack, path, body)
            for path, body in zip(paths, bodies, strict=True)
        ]
        until(lambda: stack.counted(stack.decodes, OUTPUTS) >= enough, 20.0, "tokens flow")
        with lost(stack, busy(stack.decodes), signal.SIGKILL):
            answers = [stream.result() for stream in streams]
    return answers, retries(stack) - before


def test_all_fields_are_asked_for() -> None:
    """By the night's requests; `stream` and the model are each way's own."""
    bodies: dict[str, set[str]] = {}
    for request in requests(range(300)):
        names = bodies.setdefault(request.path, set())
        names.update(request.body)
        if request.stops:
            names.add("stop")
        if request.stop_ids:
            names.add("stop_token_ids")
    kind = {TEXT: CompletionBody}
    for path, names in bodies.items():
        fields = kind.get(path, ChatBody).model_fields.keys()
        assert fields - names == {"model", "stream"}, path


def test_the_judge_sees_differences() -> None:
    head = {"id": "x", "object": "o", "created": 1, "model": "m"}

    def piece(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
        tokens = [*map(ord, text)]
        choice = {"index": index, "text": text, "token_ids": tokens, "finish_reason": finish}
        return {**head, "choices": [choice]}

    answer = joined([piece("a"), piece("c", index=1), piece("b", "stop"), piece("", "stop", 1)])
    both = [("ab", [97, 98]), ("c", [99])]
    assert [(choice["text"], choice["token_ids"]) for choice in answer["choices"]] == both
    other = joined([piece("aB", "length"), piece("c", "stop", 1)])
    fields = ["finish_reason", "text", "token_ids[1]"]
    assert [one.split(":")[0] for one in differences(answer, other)] == [
        f".choices[0].{field}" for field in fields
    ]
    with pytest.raises(AssertionError, match="follows the end"):
        joined([piece("a", "stop"), piece("b")])
