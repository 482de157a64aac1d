"""Grammars for calls: they compile, let the model's form through and nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvrelay.services.router.tools.formats import (
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    THINKING,
    CallFormat,
    begins_thinking,
    call_format,
    thinking_of,
)
from kvrelay.services.router.tools.grammar import Function, Wanted, call_grammar

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "enum": ["Oslo", "Lima"]}},
}
FUNCTIONS = (Function("get_weather", CITY, strict=True), Function("now", None))
FORMATS = [HERMES, LLAMA, JSON, MISTRAL, MISTRAL_NAMED]
CONTROL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]"]
IDS = {text: 257 + at for at, text in enumerate(CONTROL)}


class ByteVocabulary:
    """A token for each byte, EOS, and the control tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *map(str.encode, CONTROL)]
    special_token_ids = range(256, 257 + len(CONTROL))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tokens(text: str) -> list[int]:
    pieces = re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text)
    return [id for piece in pieces for id in ([IDS[piece]] if piece in IDS else piece.encode())]


@pytest.fixture(scope="module")
def llguidance() -> Any:
    return pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def vocabulary(llguidance: Any) -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()))


def accepts(llguidance: Any, vocabulary: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def answer(format: CallFormat, *calls: tuple[str, str]) -> str:
    """As models of this format write it."""
    if format.named:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    key = format.arguments_key
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if format is HERMES:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if format is LLAMA:
        return "; ".join(objects)
    if format is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


OSLO, NOW = ("get_weather", '{"city": "Oslo"}'), ("now", "{}")


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.name}{'-named' * f.named}")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("must_call", [False, True])
def test_a_grammar_takes_calls_as_they_should_be(
    llguidance: Any, vocabulary: Any, format: CallFormat, many: bool, must_call: bool
) -> None:
    grammar = call_grammar(Wanted(FUNCTIONS, must_call, many), format, IDS.get)

    def taken(text: str) -> bool:
        return accepts(llguidance, vocabulary, grammar, text)

    assert taken(answer(format, OSLO)) and taken(answer(format, NOW))
    assert taken(answer(format, OSLO, NOW)) == many
    assert not taken(answer(format, ("get_weather", '{"city": "Rome"}')))
    assert not taken(answer(format, ("get_weather", "{}")))
    assert not taken(answer(format, ("now", '{"a": 1}')))
    assert not taken(answer(format, ("other", "{}")))
    assert not taken(answer(format, ("get_weather", '{"city":\n\n"Oslo"}')))
    for text in ("Hello {there}", "", "So: " + answer(format, OSLO)):
        assert taken(text) == (not must_call)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.name}{'-named' * f.named}")
@pytest.mark.parametrize("thinking", ["think", "mistral"])
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_may_come_first(
    llguidance: Any, vocabulary: Any, format: CallFormat, thinking: str, begun: bool
) -> None:
    tags = THINKING[thinking]
    wanted = Wanted(FUNCTIONS, True, False, tags, thinking_begun=begun)
    grammar = call_grammar(wanted, format, IDS.get)
    thought = f"{'' if begun else tags.begin}\nhm {{é}}\n{tags.end}\n\n"
    assert accepts(llguidance, vocabulary, grammar, thought + answer(format, OSLO))
    assert not accepts(llguidance, vocabulary, grammar, thought + "Hello")
    assert accepts(llguidance, vocabulary, grammar, answer(format, OSLO)) != begun


def test_what_is_not_strict_leaves_out_what_cannot_be_enforced(
    llguidance: Any, vocabulary: Any
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}

    def complaint(strict: bool) -> str:
        wanted = Wanted([Function("f", schema, strict)], True, False)
        grammar = call_grammar(wanted, HERMES, IDS.get)
        return str(
            llguidance.LLMatcher.validate_grammar(
                llguidance.LLMatcher.grammar_from_lark(grammar), vocabulary
            )
        )

    assert complaint(strict=False) == ""
    assert "not" in complaint(strict=True)


def test_many_functions_compile_in_time(llguidance: Any, vocabulary: Any) -> None:
    functions = [Function(f"get_{at:03}", CITY, strict=True) for at in range(128)]
    begin = time.perf_counter()
    grammar = call_grammar(Wanted(functions, True, True), HERMES, IDS.get)
    call = answer(HERMES, ("get_127", '{"city": "Lima"}'))
    assert accepts(llguidance, vocabulary, grammar, call)
    assert time.perf_counter() - begin < 2


QWEN = "{{ tools }}<tool_call>\\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (QWEN, HERMES),
        ("{{ tools }}<tool_call><function=name>", JSON),
        ("{{ tools }}<|python_tag|>", LLAMA),
        ("{{ tools }}<|start_header_id|>ipython<|end_header_id|>", LLAMA),
        ("[AVAILABLE_TOOLS] {{ tools }}[TOOL_CALLS][", MISTRAL),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_NAMED),
        ("{{ tools }}", JSON),
    ],
)
def test_the_format_is_told_from_the_template(template: str, format: CallFormat) -> None:
    assert call_format(template) is format
    assert call_format(template, "none").name == "none"
    assert call_format(template, "json") is JSON
    assert call_format(template, "hermes") is HERMES


def test_reasoning_is_told_from_the_template_and_the_prompts_end() -> None:
    tags = THINKING["think"]
    assert thinking_of("{{ content.split('</think>')[-1] }}") is tags
    assert thinking_of("[THINK][/THINK]") is THINKING["mistral"]
    assert thinking_of(QWEN) is None
    assert thinking_of("</think>", "none") is None
    assert thinking_of(QWEN, "think") is tags
    ends: Sequence[tuple[str, bool]] = [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("a <think> b", False),
    ]
    for prompt, begins in ends:
        assert begins_thinking(prompt, tags) == begins
