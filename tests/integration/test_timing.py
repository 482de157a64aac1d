"""Where the time of a request went, over all processes: told with the answer, and kept."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.integration.clients import ask, token_ids
from tests.integration.test_failover import OUTPUTS, busy, lost, varied_requests
from tests.stack import Stack, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKS = {"X-Kvrelay-Timing": "1"}
OF_TTFT = ("gateway", "choose_workers", "prefill_queue", "prefill", "to_the_client")


def post(stack: Stack, path: str, headers: dict[str, str] = ASKS, **body: Any) -> httpx.Response:
    answer = stack.http.post(
        f"{stack.url}{path}", json={"model": stack.model, **body}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer


def shown(stack: Stack, id: str) -> dict[str, Any]:
    answer = stack.http.get(f"{stack.admin}/dashboard/api/requests/{id}")
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()
    return record


def check_adds_up(timing: dict[str, float]) -> None:
    """Numbers are rounded to a microsecond each."""
    parts = sum(timing.get(f"{name}_ms", 0) for name in OF_TTFT)
    assert parts == pytest.approx(timing["ttft_ms"], abs=0.01)
    whole = timing["ttft_ms"] + timing["stream_ms"]
    assert whole == pytest.approx(timing["total_ms"], abs=0.01)
    assert min(timing.values()) >= 0


def check_nested(record: dict[str, Any]) -> None:
    root, *spans = record["spans"]
    assert root["parent"] is None
    for span in spans:
        outer = record["spans"][span["parent"]]
        assert span["start_ms"] <= span["end_ms"]
        assert outer["start_ms"] <= span["start_ms"]
        # A worker may say that it ended a little after the answer did.
        assert span["end_ms"] <= outer["end_ms"] or outer is root


def traced(stack: Stack, id: str, *flags: str) -> tuple[int, str]:
    program = [sys.executable, "-m", "kvrelay.services.cli", "trace", id, "--router", stack.admin]
    done = subprocess.run([*program, *flags], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def by_part(record: dict[str, Any]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for span in record["spans"]:
        out.setdefault(span["part"], []).append(span["name"])
    return out


@pytest.mark.parametrize("stack", ["split", "unsplit"], indirect=True)
def test_who_asks_is_told_and_nobody_else(stack: Stack) -> None:
    prompt = token_ids(random.Random(f"timing {stack.folder}"), 100)
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = post(stack, TEXT, **body)
    timing = answer.json()["kvrelay_timing"]
    check_adds_up(timing)
    header = answer.headers["server-timing"]
    assert header.split(", ")[0] == f"gateway;dur={timing['gateway_ms']:.3f}"
    lines = post(stack, TEXT, **body, stream=True).text.split("\n\n")
    *_, last, done, _ = lines
    assert done == "data: [DONE]"
    told = json.loads(last.removeprefix("data: "))
    assert told["choices"] == [] and "usage" not in told
    check_adds_up(told["kvrelay_timing"])
    message = [{"role": "user", "content": "hello"}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _, _ = post(stack, CHAT, messages=message, max_tokens=4, **usage).text.split("\n\n")
    assert {"usage", "kvrelay_timing"} <= json.loads(last.removeprefix("data: ")).keys()
    for headers in ({}, {"X-Kvrelay-Timing": "0"}):
        silent = post(stack, TEXT, headers, **body)
        assert "kvrelay_timing" not in silent.json() and "server-timing" not in silent.headers


def test_a_split_request_has_the_spans_of_all_three(split: Stack) -> None:
    prompt = token_ids(random.Random("three parts"), 200)
    answer = post(split, TEXT, prompt=prompt, max_tokens=8, ignore_eos=True).json()
    id = answer["id"]

    def told() -> bool:
        return len(by_part(shown(split, id))) == 3

    until(told, 2.0, "both workers told their parts")
    record = shown(split, id)
    check_nested(record)
    parts = by_part(record)
    assert parts["router"] == ["request", "gateway", "choose workers", "first token", "stream"]
    prefill, decode = parts[split.prefills[0].name], parts[split.decodes[0].name]
    assert prefill[:5] == [
        "prefill worker",
        "prefill queue",
        "ask for room",
        "prefill",
        "relay exposed",
    ]
    # Steps of 32 tokens; each gives a chunk to the relay.
    assert prefill.count("compute chunk") == 7 and prefill.count("relay chunk") >= 7
    assert decode == ["decode worker", "reserve", "receive", "decode"]
    tokens = [
        span["attributes"]["kvrelay.tokens"]
        for span in record["spans"]
        if span["name"] == "compute chunk"
    ]
    assert sum(tokens) == len(prompt)
    assert "Of that: gateway" in record["why"] and "route" in record["why"]
    status, text = traced(split, id)
    assert status == 0 and all(part in text for part in parts) and "compute chunk" in text
    assert "and 7 like it" not in text and record["why"][:40] in text
    status, text = traced(split, id, "--json")
    assert status == 0 and json.loads(text)["id"] == record["id"]
    status, text = traced(split, "unknown")
    assert status == 1 and text.count("\n") == 1 and "unknown is not in flight" in text


def test_choices_are_no_retries(split: Stack) -> None:
    prompt = token_ids(random.Random("choices"), 40)
    answer = post(split, TEXT, prompt=prompt, max_tokens=4, n=3, seed=1).json()
    record = shown(split, answer["id"])
    assert record["attempts"] == 1 and "attempts" not in record["why"]


@pytest.mark.leaks_allowed
def test_an_answer_that_went_on_elsewhere_shows_both_attempts(tcp: Stack) -> None:
    requests = varied_requests(60, "timing", answer=400)[:1]
    enough = tcp.counted(tcp.decodes, OUTPUTS) + 40
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, tcp, TEXT, requests[0])
        until(lambda: tcp.counted(tcp.decodes, OUTPUTS) >= enough, 20.0, "tokens flow")
        with lost(tcp, busy(tcp.decodes), signal.SIGKILL):
            answer.result()
    newest = tcp.http.get(f"{tcp.admin}/dashboard/api/requests?limit=1").json()["requests"][0]
    record = shown(tcp, newest["id"])
    check_nested(record)
    assert record["attempts"] == 2 and "2 attempts" in record["why"]
    attempts = {
        span["attributes"]["kvrelay.attempt"]
        for span in record["spans"]
        if span["parent"] == 0
        if "kvrelay.attempt" in span["attributes"]
    }
    assert attempts == {0, 1}
