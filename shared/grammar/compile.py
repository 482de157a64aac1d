"""From what a client asks for to llguidance's grammar, checked as a worker will use it.

Both sides compile under the same limits, so that what a router let through fails nowhere else.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.schema import prepare
from kvrelay.shared.types import GrammarKind

WHITESPACE = r" |\n {0,20}|\n\t{0,8}"
"""Between JSON's tokens, at most once: a model that once began to indent must come to an end."""
MAX_GRAMMAR_BYTES = 1 << 20
"""Of a grammar as it travels."""
MAX_COMPLAINT = 300


def limits() -> LLParserLimits:
    """At their speeds the fuel of a step lasts about 10 ms, and that of a compilation 20 ms."""
    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def serialize(kind: GrammarKind, text: str, around: str = "") -> str:
    """The one grammar of such a request, within another if there is one around. Raises
    `BadGrammar`."""
    try:
        grammar = _within(around, _SERIALIZERS[kind](text))
        size = len(grammar.encode())
    except UnicodeError as error:
        raise BadGrammar("it has half of a surrogate pair, which is no text") from error
    except RecursionError as error:
        raise BadGrammar("it is nested too deep") from error
    except ValueError as error:
        raise BadGrammar(_one_line(str(error))) from error
    if size > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"its grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    return grammar


def _within(around: str, grammar: str) -> str:
    if not around:
        return grammar
    is_lark = not grammar.startswith("{")
    parts = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
    content, *others = parts
    whole = [{"lark_grammar": around}, {**content, "name": "content"}, *others]
    return json.dumps({"grammars": whole})


def _json_schema(text: str) -> str:
    schema = json.dumps(prepare(json.loads(text)), ensure_ascii=False, separators=(",", ":"))
    schema.encode()
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _choice(text: str) -> str:
    """One terminal: as rules, thousands of them would be too many for the parser."""
    options = [json.dumps(option, ensure_ascii=False) for option in json.loads(text)]
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(options))


def _lark(text: str) -> str:
    """Never as it is: the library takes a text that begins with a brace for a serialised one."""
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def _grammar(text: str) -> str:
    """GBNF says `::=`; all else is Lark."""
    if re.search(r"\[[^\]]*\btemperature\s*=", text):
        raise ValueError("a rule cannot have a temperature of its own")
    return _lark(grammar_from("gbnf", text) if "::=" in text else text)


_SERIALIZERS: Mapping[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.GRAMMAR: _grammar,
    GrammarKind.CALLS: LLMatcher.grammar_from_lark,
}


def compiled(tokenizer: LLTokenizer, grammar: str, *, lenient: bool = False) -> LLMatcher:
    """At the beginning of an answer. Raises `BadGrammar`, also where nothing satisfies it, and
    unless it is `lenient` where the library passes something over."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_stopped():
        matcher.compute_bitmask()  # what contradicts itself may show only here
    if matcher.is_error():
        said = _one_line(matcher.get_error())
        raise BadGrammar("nothing satisfies it" if said.startswith("NoExtension") else said)
    if not lenient and (warnings := matcher.get_grammar_warnings()):
        raise BadGrammar(_one_line(warnings[0]))
    return matcher


def try_out(matcher: LLMatcher, tokens: int = 32, step_s: float = 0.1) -> None:
    """Follow one answer for a while. Raises `BadGrammar` where it cannot go on, and where a token
    takes too long: some grammars are compiled in no time and explode with the first tokens, which
    whoever computes beside them would wait for. The caller's time limit ends what explodes for
    good."""
    draw = random.Random(0)
    for _ in range(tokens):
        begun_s = time.monotonic()
        mask = matcher.compute_bitmask()
        _check_alive(matcher)
        byte = draw.choice([at for at, bits in enumerate(mask) if bits])
        token = 8 * byte + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])
        matcher.consume_token(token)
        _check_alive(matcher)
        if time.monotonic() - begun_s > step_s:
            raise BadGrammar(f"too complex: one token takes more than {step_s:g} s")
        if matcher.is_stopped():
            return


def _check_alive(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise BadGrammar(f"an answer could not go on: {_one_line(matcher.get_error())}")


def _one_line(text: str) -> str:
    """The library's first words: what follows shows its insides, or the whole grammar again."""
    text = re.split(r"\n<|\n *\d+ \||<backtrace>", text, maxsplit=1)[0]
    text = " ".join(text.split())
    return text if len(text) <= MAX_COMPLAINT else text[: MAX_COMPLAINT - 3] + "..."
