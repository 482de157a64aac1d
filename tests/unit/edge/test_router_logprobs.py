"""How tokens, their logprobs and their ids are told: exact values of both routes."""

from __future__ import annotations

import math
import threading
from typing import Any

import httpx
import pytest
from tests.unit.edge.asking import BODIES, chunks, whole

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.chat import ChatWording
from kvrelay.services.router.openai.message import Ending, Fields, PlainText
from kvrelay.shared.types import FinishReason, Logprobs

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def telling(cluster: Any, *steps: tuple[bytes, Logprobs], end: FinishReason = LENGTH) -> None:
    """Every leg says these tokens with these logprobs."""
    cluster.script = lambda request: [
        TokenEvent(
            leg,
            index,
            cluster.byte_ids[data],
            end if index == len(steps) - 1 else None,
            logprobs,
        )
        for index, (data, logprobs) in enumerate(steps)
        for leg in range(len(request.legs))
    ]


async def test_a_completion_has_four_lists(client: httpx.AsyncClient, cluster: Any) -> None:
    ids = cluster.byte_ids
    telling(
        cluster,
        (b"hello", Logprobs(-0.5, 1, ((ids[b"hello"], -0.5), (ids[b"x"], -1.5)))),
        (b"\xc3", Logprobs(-9.0, 7, ((ids[b"\xf0"], -0.25), (ids[b"y"], -2.0)))),
        (b"\xa9", Logprobs(-math.inf, 200, ((ids[b"z"], 0.0), (ids[b"\xc3"], -math.inf)))),
    )
    (choice,) = (await whole(client, COMPLETIONS, logprobs=2))["choices"]
    assert choice["text"] == "helloé"
    assert choice["logprobs"] == {
        "text_offset": [0, 5, 5],
        "token_logprobs": [-0.5, -9.0, -9999.0],
        "tokens": ["hello", r"bytes:\xc3", r"bytes:\xa9"],
        "top_logprobs": [
            {"hello": -0.5, "x": -1.5},
            {r"bytes:\xf0": -0.25, "y": -2.0, r"bytes:\xc3": -9.0},
            {"z": 0.0, r"bytes:\xc3": -9999.0, r"bytes:\xa9": -9999.0},
        ],
    }


async def test_a_chat_has_one_list_with_true_bytes(client: httpx.AsyncClient, cluster: Any) -> None:
    ids = cluster.byte_ids
    telling(
        cluster,
        (b"\xc3", Logprobs(-9.0, 7, ((ids[b"x"], -0.25), (ids[b"\xc3"], -9.0)))),
        (b"\xa9", Logprobs(float("nan"), 1, ((ids[b"\xa9"], -0.5), (ids[b"y"], -math.inf)))),
    )
    answer = await whole(client, CHAT, logprobs=True, top_logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": r"\xc3",
                "logprob": -9.0,
                "bytes": [0xC3],
                "top_logprobs": [{"token": "x", "logprob": -0.25, "bytes": [120]}],
            },
            {
                "token": r"\xa9",
                "logprob": -9999.0,
                "bytes": [0xA9],
                "top_logprobs": [{"token": r"\xa9", "logprob": -0.5, "bytes": [0xA9]}],
            },
        ],
        "refusal": None,
    }
    plain = await whole(client, CHAT, logprobs=True)
    assert [e["top_logprobs"] for e in plain["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_entries_travel_with_the_text_they_begin_in(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("aSTébSTO", LENGTH)
    events = await chunks(client, COMPLETIONS, logprobs=0, stop="STOP")
    told = [
        (c["text"], (c["logprobs"] or {}).get("tokens"), (c["logprobs"] or {}).get("text_offset"))
        for (c,) in (event["choices"] for event in events)
    ]
    parts = [r"bytes:\xc3", r"bytes:\xa9"]
    assert told == [
        ("a", ["a"], [0]),
        ("STé", ["S", "T", *parts], [1, 2, 3, 3]),
        ("b", ["b"], [4]),
        ("STO", ["S", "T", "O"], [5, 6, 7]),
        ("", None, None),
    ]


async def test_tokens_of_a_stop_are_told_when_the_choice_ends(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("abSTOPc")
    events = await chunks(client, COMPLETIONS, logprobs=0, stop="STOP", return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert [c["text"] for c in choices] == ["a", "b", ""]
    last = choices[-1]
    assert last["finish_reason"] == "stop"
    assert last["logprobs"]["tokens"] == ["S", "T", "O", "P"]
    assert last["logprobs"]["text_offset"] == [2, 2, 2, 2]
    assert last["token_ids"] == [cluster.byte_ids[bytes([byte])] for byte in b"STOP"]


async def test_the_token_that_ended_an_answer_has_an_entry_and_no_text(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("a")
    (choice,) = (await whole(client, COMPLETIONS, logprobs=0, return_token_ids=True))["choices"]
    assert choice["text"] == "a"
    assert choice["logprobs"]["tokens"] == ["a", "<|im_end|>"]
    assert choice["token_ids"] == [cluster.byte_ids[b"a"], cluster.eos]


async def test_stops_are_text_if_they_are_to_be_included(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("abSTOPc")
    options = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    cut = await whole(client, COMPLETIONS, stop="TO", **options)
    assert cut["choices"][0]["text"] == "abSTO"
    ended = await whole(client, COMPLETIONS, **options)
    assert ended["choices"][0]["text"] == "abSTOPc<|im_end|>"
    hidden = await whole(client, COMPLETIONS, include_stop_str_in_output=True)
    assert hidden["choices"][0]["text"] == "abSTOPc"
    shown = await whole(client, COMPLETIONS, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "abSTOPc"


async def test_control_tokens_inside_an_answer_can_be_shown(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    x = cluster.byte_ids[b"x"]
    cluster.script = cluster.drawing([x, cluster.eos, x], LENGTH)
    fields = {"ignore_eos": True, "logprobs": 0}
    for special, text, offsets in [(True, "xx", [0, 1, 1]), (False, "x<|im_end|>x", [0, 1, 11])]:
        answer = await whole(client, COMPLETIONS, skip_special_tokens=special, **fields)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_what_evaluations_ask_for(
    client: httpx.AsyncClient, cluster: Any, max_tokens: int
) -> None:
    """A log-likelihood: the prompt's own logprobs, and at most one more token."""
    cluster.script = cluster.saying("x")
    prompts = ["hé", "hello w"]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0, "prompt": prompts}
    answer = await whole(client, COMPLETIONS, max_tokens=max_tokens, **fields)
    after = "" if max_tokens == 0 else "x"
    assert [choice["text"] for choice in answer["choices"]] == [p + after for p in prompts]
    logprobs = answer["choices"][1]["logprobs"]
    end = [] if max_tokens == 0 else ["x", "<|im_end|>"]
    assert logprobs["tokens"] == ["hello", " w", *end]
    assert logprobs["text_offset"] == [0, 5, 7, 8][: len(logprobs["tokens"])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in top
    ends = {choice["finish_reason"] for choice in answer["choices"]}
    assert ends == {"length" if max_tokens == 0 else "stop"}
    assert answer["usage"]["completion_tokens"] == (0 if max_tokens == 0 else 4)
    assert answer["usage"]["prompt_tokens"] == 5


async def test_an_echo_comes_with_the_first_chunk(client: httpx.AsyncClient, cluster: Any) -> None:
    cluster.script = cluster.saying("abc")
    events = await chunks(client, COMPLETIONS, echo=True, n=2, stop="abx", logprobs=0)
    said = [(c["index"], c["text"]) for event in events for c in event["choices"]]
    assert said == [(0, "hi"), (1, "hi"), (0, "abc"), (1, "abc"), (0, ""), (1, "")]
    assert events[0]["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    assert events[2]["choices"][0]["logprobs"]["text_offset"] == [2, 3, 4]


async def test_prompt_logprobs_are_by_position_and_id(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    ids = cluster.byte_ids
    h, i, x = ids[b"h"], ids[b"i"], ids[b"\xc3"]
    told = Logprobs(-3.0, 5, ((x, -0.5), (h, -math.inf)))
    cluster.script = lambda request: [
        TokenEvent(0, 0, x, LENGTH, None, (told,)),
    ]
    wanted = [
        None,
        {
            str(i): {"logprob": -3.0, "rank": 5, "decoded_token": "i"},
            str(x): {"logprob": -0.5, "rank": 1, "decoded_token": r"\xc3"},
            str(h): {"logprob": -9999.0, "rank": 2, "decoded_token": "h"},
        },
    ]
    (choice,) = (await whole(client, COMPLETIONS, prompt_logprobs=2))["choices"]
    assert choice["prompt_logprobs"] == wanted
    assert choice["logprobs"] is None
    (fewer,) = (await whole(client, COMPLETIONS, prompt_logprobs=0))["choices"]
    assert list(fewer["prompt_logprobs"][1]) == [str(i)]
    first, *rest = await chunks(client, COMPLETIONS, prompt_logprobs=2)
    assert first["choices"][0]["prompt_logprobs"] == wanted
    assert all("prompt_logprobs" not in event["choices"][0] for event in rest)


async def test_a_chat_tells_of_its_prompt_once(client: httpx.AsyncClient, cluster: Any) -> None:
    cluster.script = cluster.saying("é")
    fields: dict[str, Any] = {"prompt_logprobs": 0, "return_token_ids": True, "n": 2}
    answer = await whole(client, CHAT, **fields)
    assert answer["prompt_token_ids"] == list(cluster.requests[0].legs[0].prompt)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    tokens = [cluster.byte_ids[b"\xc3"], cluster.byte_ids[b"\xa9"], cluster.eos]
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens] * 2
    first, *rest = await chunks(client, CHAT, **fields)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert all("prompt_token_ids" not in event for event in rest)
    assert [event["choices"][0]["token_ids"] for event in (first, *rest)] == [
        tokens[:2],
        tokens[:2],
        tokens[2:],
        tokens[2:],
    ]


async def test_the_best_are_those_that_are_likeliest_as_a_whole(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    x, y = cluster.byte_ids[b"x"], cluster.byte_ids[b"y"]
    chosen = [[-3.0, -0.5], [-1.0, -1.0], [-math.inf, 0.0], [-1.0, -1.5]] * 2
    cluster.script = lambda request: [
        TokenEvent(leg, at, [x, y][at], LENGTH if at else None, Logprobs(chosen[leg][at], 1))
        for leg in range(8)
        for at in (0, 1)
    ]
    answer = await whole(
        client, COMPLETIONS, prompt=["a", "b"], best_of=4, n=2, logprobs=0, echo=False
    )
    told = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert told == [chosen[1], chosen[3]] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 16  # all that was generated


async def test_every_chunk_has_the_usage_so_far_if_asked(
    client: httpx.AsyncClient, cluster: Any
) -> None:
    cluster.script = cluster.saying("ab")
    for path in BODIES:
        for last in (True, False):
            options = {"continuous_usage_stats": True, "include_usage": last}
            events = await chunks(client, path, stream_options=options)
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == ([1, 2, 3, 3] if last else [1, 2, 3])
            assert bool(events[-1]["choices"]) is not last


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"prompt_logprobs": 0}, {"best_of": 2}])
async def test_logprobs_that_a_worker_left_out_are_a_failure(
    client: httpx.AsyncClient, cluster: Any, fields: dict[str, Any]
) -> None:
    """Never an answer without what was asked for."""
    x = cluster.byte_ids[b"x"]
    cluster.script = lambda request: [TokenEvent(leg, 0, x, LENGTH) for leg in range(2)]
    response = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | fields)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert cluster.generations[0].closes == 1


async def test_a_long_prompts_logprobs_are_worded_off_the_event_loop(
    client: httpx.AsyncClient, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer, whichever thread words it."""
    cluster.script = cluster.saying("ab")
    fields: dict[str, Any] = {"prompt": "h" * 150, "echo": True, "logprobs": 2}
    inline = await whole(client, COMPLETIONS, **fields)
    streamed = await chunks(client, COMPLETIONS, **fields)
    monkeypatch.setattr("kvrelay.services.router.openai.generate.INLINE_TOLD", 10)
    again = await whole(client, COMPLETIONS, **fields)
    assert again["choices"] == inline["choices"]
    repeated = await chunks(client, COMPLETIONS, **fields)
    assert [e["choices"] for e in repeated] == [e["choices"] for e in streamed]


async def test_a_long_text_is_read_off_the_event_loop(
    client: httpx.AsyncClient, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are looked for in it, character by character."""
    on = []
    whole_of = ChatWording.whole

    def whole_here(self: ChatWording, choices: Any, usage: Any, timing: Any) -> bytes:
        on.append(threading.current_thread() is threading.main_thread())
        return whole_of(self, choices, usage, timing)

    monkeypatch.setattr(ChatWording, "whole", whole_here)
    for text in ("ab", "ab" * 10_000):
        cluster.script = cluster.saying(text)
        answer = await whole(client, CHAT)
        assert answer["choices"][0]["message"]["content"] == text
    assert on == [True, False]


class OneBehind(PlainText):
    """Holds the last character back, as a parser does that looks for a tag."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, text: str) -> list[Fields]:
        text = self.held + text
        self.held = text[-1]
        return [{"content": text[:-1]}] if text[:-1] else []

    def finish(self, reason: FinishReason) -> Ending:
        return Ending([{"content": self.held}] if self.held else [], f"{reason} after all")


async def test_what_a_parser_holds_back_keeps_its_entries(
    client: httpx.AsyncClient, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvrelay.services.router.openai.chat.parser_of", lambda request, leg: OneBehind()
    )
    cluster.script = cluster.saying("aé")
    fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "prompt_logprobs": 0}
    answer = await whole(client, CHAT, **fields)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "aé"
    assert choice["finish_reason"] == "stop after all"
    events = await chunks(client, CHAT, **fields)
    pieces = [event["choices"][0] for event in events]
    assert [piece["delta"] for piece in pieces] == [
        {"role": "assistant", "content": "a"},
        {"content": "é"},
        {},
    ]
    assert [piece["finish_reason"] for piece in pieces] == [None, None, "stop after all"]
    told = [
        entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]
    ]
    assert told == choice["logprobs"]["content"]
    assert [id for piece in pieces for id in piece["token_ids"]] == choice["token_ids"]
    assert events[0]["prompt_logprobs"] == answer["prompt_logprobs"]
