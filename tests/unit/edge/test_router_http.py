"""Answers of the two routes, stream and whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.unit.edge.asking import BODIES, CHAT, COMPLETION, chunks, whole

from kvrelay.services.router.generation import Readiness, TokenEvent
from kvrelay.services.router.openai.api import GATHERING_NS, create_app, random_draws
from kvrelay.shared.types import FinishReason

both = pytest.mark.parametrize("path", BODIES)


def said(choice: dict[str, Any]) -> str:
    """The text in a choice of either route, whole or chunk."""
    message = choice.get("message") or choice.get("delta") or choice
    text: str = message.get("content", message.get("text", ""))
    return text


def joined(events: list[dict[str, Any]]) -> dict[int, tuple[str, list[str]]]:
    """By index: the text, and every finish reason that is not null."""
    legs: dict[int, tuple[str, list[str]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, ends = legs.get(choice["index"], ("", []))
        end = choice["finish_reason"]
        legs[choice["index"]] = (text + said(choice), ends + [end] * (end is not None))
    return legs


@both
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("hello", FinishReason.STOP),
        ("hello", FinishReason.LENGTH),
        ("naïve 日本語 🙂", FinishReason.STOP),
        ("naïve 日本語 🙂", FinishReason.LENGTH),
        ("", FinishReason.STOP),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(
    client: httpx.AsyncClient, cluster: Any, path: str, text: str, end: FinishReason
) -> None:
    cluster.script = cluster.saying(text, end)
    answer = await whole(client, path, n=2)
    events = await chunks(client, path, n=2, stream_options={"include_usage": True})
    assert [said(choice) for choice in answer["choices"]] == [text, text]
    assert joined(events) == {0: (text, [end]), 1: (text, [end])}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    tokens = len(text.encode()) + (end is FinishReason.STOP)
    assert answer["usage"]["completion_tokens"] == 2 * tokens


@both
async def test_no_delta_holds_a_part_of_a_character(
    client: httpx.AsyncClient, cluster: Any, path: str
) -> None:
    cluster.script = cluster.saying("é🙂x")
    events = await chunks(client, path)
    assert [said(event["choices"][0]) for event in events] == ["é", "🙂", "x", ""]


async def test_the_exact_bytes_of_a_chat_stream(client: httpx.AsyncClient, cluster: Any) -> None:
    cluster.script = cluster.saying("hé", FinishReason.LENGTH)
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    head = (
        'data: {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1750000000, '
        '"model": "tiny", "choices": [{"index": 0, "delta": '
    )
    assert response.text == (
        head
        + '{"role": "assistant", "content": "h"}, "logprobs": null, "finish_reason": null}]}\n\n'
        + head
        + '{"content": "\\u00e9"}, "logprobs": null, "finish_reason": null}]}\n\n'
        + head
        + '{}, "logprobs": null, "finish_reason": "length"}]}\n\n'
        + "data: [DONE]\n\n"
    )
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_the_whole_chat_answer(client: httpx.AsyncClient, cluster: Any) -> None:
    assert await whole(client, "/v1/chat/completions") == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1750000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 6,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_the_whole_completion(client: httpx.AsyncClient, cluster: Any) -> None:
    assert await whole(client, "/v1/completions") == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1750000000,
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_choice_without_text_still_has_its_role(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("")
    (event,) = await chunks(client, "/v1/chat/completions")
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert event["choices"][0]["finish_reason"] == "stop"


@both
@pytest.mark.parametrize("stop", ["wo", "lo w", "🙂", ["zzz", "rld"], "h"])
async def test_a_stop_string_cuts_the_text_and_the_leg(
    client: httpx.AsyncClient, cluster: Any, path: str, stop: str | list[str]
) -> None:
    text = "hello world 🙂 and more"
    cluster.script = cluster.saying(text)
    wanted = text[
        : min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    ]
    answer = await whole(client, path, stop=stop)
    events = await chunks(client, path, stop=stop, stream_options={"include_usage": True})
    assert said(answer["choices"][0]) == wanted
    assert joined(events) == {0: (wanted, ["stop"])}
    ended = len(text[: len(wanted)].encode()) + len(
        (stop if isinstance(stop, str) else "rld").encode()
    )
    assert answer["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == ended
    assert [(g.stopped, g.closes) for g in cluster.generations] == [([0], 1), ([0], 1)]


@both
async def test_a_stop_that_never_comes_changes_nothing(
    client: httpx.AsyncClient, cluster: Any, path: str
) -> None:
    cluster.script = cluster.saying("hello", FinishReason.LENGTH)
    events = await chunks(client, path, stop=["hello world, and forty characters more"])
    assert joined(events) == {0: ("hello", ["length"])}
    assert [said(choice) for event in events for choice in event["choices"]] == ["hello", ""]


@both
async def test_text_goes_out_token_by_token_although_there_is_a_stop(
    client: httpx.AsyncClient, cluster: Any, path: str
) -> None:
    cluster.script = cluster.saying("abcd")
    events = await chunks(client, path, stop="bx")
    assert [said(event["choices"][0]) for event in events] == ["a", "bc", "d", ""]


async def test_events_after_a_leg_has_ended_are_neither_text_nor_usage(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    late = [TokenEvent(0, index, cluster.byte_ids[b"x"]) for index in range(9)]
    other = TokenEvent(1, 0, cluster.eos, FinishReason.STOP)
    cluster.script = lambda request: [*late, other]
    answer = await whole(client, "/v1/completions", n=2, stop="xx")
    assert [choice["text"] for choice in answer["choices"]] == ["", ""]
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_string_does_not_count_before_min_tokens(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("xaxax")
    answer = await whole(client, "/v1/completions", stop="x", min_tokens=2)
    assert answer["choices"][0]["text"] == "xa"
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_id_is_counted_but_is_no_text(client: httpx.AsyncClient, cluster: Any) -> None:
    x, y = cluster.byte_ids[b"x"], cluster.byte_ids[b"y"]
    cluster.script = lambda request: [TokenEvent(0, 0, x), TokenEvent(0, 1, y, FinishReason.STOP)]
    answer = await whole(client, "/v1/completions", stop_token_ids=[y])
    assert answer["choices"][0]["text"] == "x"
    assert answer["usage"]["completion_tokens"] == 2
    assert cluster.requests[0].legs[0].sampling.stop_token_ids == (y,)


async def test_control_tokens_in_an_answer_are_no_text(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    x = cluster.byte_ids[b"x"]
    tokens = [x, cluster.eos, x]
    cluster.script = lambda request: [
        TokenEvent(0, i, t, FinishReason.LENGTH if i == 2 else None) for i, t in enumerate(tokens)
    ]
    answer = await whole(client, "/v1/completions", ignore_eos=True)
    assert answer["choices"][0]["text"] == "xx"


async def test_usage_comes_only_when_asked_for(client: httpx.AsyncClient, cluster: Any) -> None:
    plain = await chunks(client, "/v1/chat/completions")
    asked = await chunks(client, "/v1/chat/completions", stream_options={"include_usage": True})
    assert all("usage" not in event for event in plain)
    assert [event["usage"] for event in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["usage"]["total_tokens"] == 27


@both
async def test_usage_says_what_was_cached(
    client: httpx.AsyncClient, cluster: Any, path: str
) -> None:
    cluster.cached_tokens = 1
    answer = await whole(client, path)
    events = await chunks(client, path, stream_options={"include_usage": True})
    for usage in (answer["usage"], events[-1]["usage"]):
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_several_prompts_and_choices_are_numbered_prompt_first(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    answer = await whole(client, "/v1/completions", prompt=["hi", "hello"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    legs = cluster.requests[0].legs
    hi, hello = (cluster.byte_ids[b"h"], cluster.byte_ids[b"i"]), (cluster.byte_ids[b"hello"],)
    assert [(leg.leg, leg.prompt, leg.choice) for leg in legs] == [
        ("1/0", hi, 0),
        ("1/1", hi, 1),
        ("1/2", hello, 0),
        ("1/3", hello, 1),
    ]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_the_clients_label_is_echoed_and_is_never_a_key(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    for label, echoed in [("job-7", "job-7"), ("job-7", "job-7"), ("a b\t", "3"), ("x" * 200, "4")]:
        response = await client.post(
            "/v1/completions", json=COMPLETION, headers={"X-Request-Id": label}
        )
        assert response.headers["x-request-id"] == echoed
    assert [request.request_id for request in cluster.requests] == ["1", "2", "3", "4"]
    assert [request.client_label for request in cluster.requests] == ["job-7", "job-7", "", ""]


async def test_the_callers_trace_travels_with_the_request(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.post("/v1/completions", json=COMPLETION, headers={"traceparent": parent})
    assert cluster.requests[0].trace_headers == {"traceparent": parent}
    assert cluster.requests[0].received_ns == 99


async def test_models_are_listed_and_found_by_name(client: httpx.AsyncClient) -> None:
    entry = {
        "id": "org/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "kvrelay",
        "root": "tiny",
        "max_model_len": 200,
    }
    listed = (await client.get("/v1/models")).json()
    assert listed == {"object": "list", "data": [entry | {"id": "tiny"}, entry]}
    assert (await client.get("/v1/models/org/tiny")).json() == entry


async def test_health_is_always_ok_and_readiness_is_the_clusters(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    cluster.is_ready = Readiness(False, "no decode worker")
    ready = await client.get("/ready")
    reason = {"status": "not ready", "reason": "no decode worker"}
    assert (ready.status_code, ready.json()) == (503, reason)
    cluster.is_ready = Readiness(True, "no prefill worker")
    reason["reason"] = "no prefill worker"
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, reason)  # it may still be starting
    health = await client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


async def test_an_older_router_is_ready_as_long_as_it_can_answer(cluster: Any, card: Any) -> None:
    now_ns = 5
    draws = replace(random_draws(), now_ns=lambda: now_ns)
    app = create_app(cluster, lambda: card, draws=draws)
    now_ns += GATHERING_NS + 1
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        cluster.is_ready = Readiness(True, "no prefill worker")
        ready = await client.get("/ready")
        reason = {"status": "degraded", "reason": "no prefill worker"}
        assert (ready.status_code, ready.json()) == (200, reason)
        cluster.is_ready = Readiness(False, "no worker")
        assert (await client.get("/ready")).status_code == 503


async def test_metrics_are_what_they_are_given(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.text == "up 1\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
