"""Calls and reasoning in an answer's text: the same however it is cut, and nothing lost."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.services.router.tools.deltas import Arguments, CallStart, Content, Delta, Reasoning
from kvrelay.services.router.tools.forms import Form, bare, hermes, llama, mistral, no_calls
from kvrelay.services.router.tools.message import MessageParser, Thinking

NAMES = {"f", "get_weather"}
THINK = Thinking("<think>", "</think>")
FORMS = {"hermes": hermes, "llama": llama, "mistral": mistral, "bare": bare, "none": no_calls}


@dataclass
class Answer:
    """What deltas add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    called: bool = False

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallStart):
                assert delta.index == len(self.calls) and delta.id == f"id{delta.index}"
                self.calls.append((delta.name, ""))
            else:
                assert isinstance(delta, Arguments) and delta.index == len(self.calls) - 1
                name, so_far = self.calls[-1]
                self.calls[-1] = (name, so_far + delta.text)


def read(
    form: Form,
    pieces: list[str],
    thinking: Thinking | None = None,
    *,
    begun: bool = False,
    one_call: bool = False,
) -> Answer:
    parser = MessageParser(
        form, NAMES, lambda at: f"id{at}", thinking, begun=begun, one_call=one_call
    )
    answer = Answer()
    for piece in pieces:
        answer.take(parser.feed(piece))
    answer.take(parser.finish())
    answer.called = parser.called
    return answer


W = '{"city": "Oslo, \\"}<\\u00e9", "days": [1, {"n": null}]}'
"""Arguments with all that could be taken for their end."""
HERMES_W = f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>'
HERMES_F = '<tool_call>{"arguments": {}, "name": "f"}</tool_call>'
MISTRAL_W = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {W}, "id": "VvvODy9mT"}}'
CALLED_W, CALLED_F = ("get_weather", W), ("f", "{}")
NO_CALL = '{"name": "Ann", "arguments": {"b": 1}}'

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "hello <b>", "hello <b>", []),
    ("hermes", HERMES_W, "", [CALLED_W]),
    ("hermes", f"Let me see.\n{HERMES_W}\n{HERMES_F}\n", "Let me see.\n", [CALLED_W, CALLED_F]),
    ("hermes", f"\n\n{HERMES_F} \nDone.", " \nDone.", [CALLED_F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [CALLED_F]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}', "", [("other", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\ude00\\n\\"}"}', "",
     [("f", '{"a": "\U0001f600\n"}')]),
    ("hermes", '<tool_call>{"type": "function", "id": null, "name": "f", "arguments": {} , '
     '"id": "a"}</tool_call>', "", [CALLED_F]),
    ("hermes", "<tool_call>sorry</tool_call>", "<tool_call>sorry</tool_call>", []),
    ("hermes", '<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}',
     '<tool_call>{"name": "a b", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}',
     '<tool_call>{"name": "f", "arguments": [1]}', []),
    ("hermes", f"<tool_call><tool_call>{HERMES_F}", "<tool_call><tool_call>", [CALLED_F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>',
     ', "x": 1}</tool_call>', [CALLED_F]),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", '<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea', []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, ', '<tool_call>{"arguments": {"a": 1}, ', []),
    ("llama", f'{{"name": "get_weather", "parameters": {W}}}', "", [CALLED_W]),
    ("llama", f'{{"name": "get_weather", "parameters": {W}}}; {{"name": "f", "parameters": {{}}}}',
     "", [CALLED_W, CALLED_F]),
    ("llama", f'<|python_tag|>{{"name": "get_weather", "parameters": {W}}}\n'
     '{"name": "f", "parameters": {}}\n', "", [CALLED_W, CALLED_F]),
    ("llama", '{"type": "function", "name": "f", "parameters": {}} ok', " ok", [CALLED_F]),
    ("llama", NO_CALL, NO_CALL, []),
    ("llama", '{"a": 1}', '{"a": 1}', []),
    ("llama", "Hi {} <|python_tag|>brave_search.call()",
     "Hi {} <|python_tag|>brave_search.call()", []),
    ("llama", '<|python_tag|>{"name": "g", "parameters": {}}; no', "; no", [("g", "{}")]),
    ("mistral", MISTRAL_W + "]", "", [CALLED_W]),
    ("mistral", MISTRAL_W + ', {"name": "f", "arguments": {}}]\n', "", [CALLED_W, CALLED_F]),
    ("mistral", MISTRAL_W + ", nothing]", ", nothing]", [CALLED_W]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{{}}", "",
     [CALLED_W, CALLED_F]),
    ("mistral", "Well [1] [TOOL_CALLS] f{}", "Well [1] ", [CALLED_F]),
    ("mistral", "[TOOL_CALLS] maybe [TOOL_CALLS][]", "[TOOL_CALLS] maybe [TOOL_CALLS][]", []),
    ("bare", f' {{"name": "get_weather", "arguments": {W}}} ', "", [CALLED_W]),
    ("bare", f'[{{"name": "get_weather", "parameters": {W}}}, {{"name": "f", "arguments": {{}}}}]',
     "", [CALLED_W, CALLED_F]),
    ("bare", '```json\n{"name": "f", "arguments": {}}\n```\n', "", [CALLED_F]),
    ("bare", "```python\n{}\n```", "```python\n{}\n```", []),
    ("bare", NO_CALL, NO_CALL, []),
    ("bare", "[1, 2]", "[1, 2]", []),
    ("none", HERMES_W, HERMES_W, []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_each_form_cut_at_every_position(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = Answer(content, "", calls, called=bool(calls))
    assert read(FORMS[form], [text]) == expected
    assert read(FORMS[form], list(text)) == expected
    for at in range(1, len(text)):
        assert read(FORMS[form], [text[:at], text[at:]]) == expected
        assert read(FORMS[form], [text[:at], *text[at : at + 3], text[at + 3 :]]) == expected


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "bare"])
def test_an_answer_that_ends_anywhere_loses_nothing(form: str) -> None:
    """A call that was begun keeps its arguments as far as they came and does not count as made."""
    texts = {
        "hermes": f"So: {HERMES_W}",
        "llama": f'{{"name": "get_weather", "parameters": {W}}}',
        "mistral": f"So: {MISTRAL_W}]",
        "bare": f'{{"name": "get_weather", "arguments": {W}}}',
    }
    text = texts[form]
    begin = text.index(W)
    for end in range(len(text)):
        answer = read(FORMS[form], [text[:end]])
        if end <= begin:
            assert answer == Answer(text[:end])
        else:
            assert answer.calls == [("get_weather", text[begin:end][: len(W)])]
            assert answer.called == (end >= begin + len(W))


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, "hm\n", "Yes"),
        ("\n<think>hm</think>Yes", False, "hm", "Yes"),
        ("\nhm</think>\nYes", True, "hm", "Yes"),
        ("<think>\nhm</think>\nYes", True, "hm", "Yes"),
        ("hm </th", True, "hm </th", ""),
        ("<think>", False, "", ""),
        ("<thi", False, "", "<thi"),
        (" Yes <think>no</think>", False, "", " Yes <think>no</think>"),
        ("<think></think>", False, "", ""),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ],
)
def test_reasoning_cut_at_every_position(
    text: str, begun: bool, reasoning: str, content: str
) -> None:
    for form in (hermes, no_calls, bare, llama, mistral):
        for at in range(len(text)):
            answer = read(form, [text[:at], text[at:]], THINK, begun=begun)
            assert answer == Answer(content, reasoning)
        assert read(form, list(text), THINK, begun=begun) == Answer(content, reasoning)


def test_calls_are_found_behind_reasoning_and_not_in_it() -> None:
    answer = read(hermes, [f"<think>{HERMES_F}</think>\n\n{HERMES_W}"], THINK)
    assert answer == Answer("", HERMES_F, [CALLED_W], called=True)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_one_call_ends_the_answer(one_by_one: bool) -> None:
    text = f"Ok {HERMES_W}\n{HERMES_F} and more"
    answer = read(hermes, list(text) if one_by_one else [text], one_call=True)
    assert answer == Answer("Ok ", "", [CALLED_W], called=True)


def test_text_is_told_as_soon_as_it_can_be_no_tag() -> None:
    parser = MessageParser(hermes, NAMES, str)
    told = [parser.feed(piece) for piece in ("Hel", "lo <", "tool", "s> ", "<tool_call", ">")]
    assert told == [
        [Content("Hel")],
        [Content("lo ")],
        [],
        [Content("<tools> ")],
        [],
        [],
    ]
    for piece in ('{"name": "f", ', '"arguments":'):
        assert parser.feed(piece) == []
    assert parser.feed(' {"a"') == [CallStart(0, "0", "f"), Arguments(0, '{"a"')]
    assert parser.feed(": 1") == [Arguments(0, ": 1")]
    assert parser.feed("}") == [Arguments(0, "}")]
    assert parser.feed("}\n</tool_call>") == []


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<think>", "</think>", "```json", "```", '"name"', '"arguments"', '"parameters"', '"f"',
    '"id"', ":", ",", ";", "{", "}", "[", "]", '"', "\\", "\\u00e9", "\\ud83d", "\n", " ", "f",
    "é\U0001f600", "1", "null", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}',
    '{"name": "f", "arguments": "{',
]  # fmt: skip


@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([None, THINK]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_any_text_however_cut_gives_the_same_and_loses_only_marks(
    form: str,
    fragments: list[str],
    cuts: list[int],
    thinking: Thinking | None,
    begun: bool,
    one_call: bool,
) -> None:
    text = "".join(fragments)
    whole = read(FORMS[form], [text], thinking, begun=begun, one_call=one_call)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(FORMS[form], pieces, thinking, begun=begun, one_call=one_call) == whole
    assert read(FORMS[form], list(text), thinking, begun=begun, one_call=one_call) == whole
    if not whole.calls and thinking is None:
        assert whole.content == text
    told = Counter(whole.content + whole.reasoning)
    for name, arguments in whole.calls:
        told += Counter(name + arguments)
    if '"{' not in text:  # those are told as the string's content, not as they stand there
        assert not told - Counter(text + "{}" * len(whole.calls)), "something was made up"
        if not one_call and '"id"' not in text:
            assert not (Counter(text) - told).keys() & set("é\U0001f600\\"), "payload was lost"


def test_a_long_answer_takes_time_in_proportion() -> None:
    """Text full of beginnings of calls is not read again and again."""
    piece = '<tool_call>{"arguments": {"a": "'

    def seconds(pieces: int) -> float:
        begin = time.perf_counter()
        for form in (hermes, llama, bare, mistral):
            read(form, [piece] * pieces)
        return time.perf_counter() - begin

    least = min(seconds(50) for _ in range(5))
    assert seconds(1000) < 100 * least, "20 times the text, and not 400 times the time"


def test_arguments_are_valid_json_when_the_models_were() -> None:
    for character in map(chr, [*range(0x20, 0x300), 0x2028, 0xFFFD, 0x1F600]):
        arguments = json.dumps({"a": character, character: [character]}, ensure_ascii=False)
        for given_as in (arguments, json.dumps(arguments)):
            call = f'<tool_call>{{"name": "f", "arguments": {given_as}}}</tool_call>'
            assert read(hermes, list(call)).calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (hermes, '<tool_call>{"name":"f","arguments":"{\\"a\\":\\"' + 800_000 * "x" + '\\"}"}'),
        (hermes, 100_000 * "<tool_call>"),
        (llama, 100_000 * "<|python_tag|>"),
    ],
    ids=["quoted", "hermes", "llama"],
)
def test_a_long_answer_takes_as_long_as_it_is(form: Form, text: str) -> None:
    begun_s = time.process_time()
    answer = read(form, [text])
    assert time.process_time() - begun_s < 5, "half a second; if each piece copies the rest, ten"
    assert len(answer.content) + sum(len(given) for _, given in answer.calls) > 800_000
