"""Requests drawn over all that both routes take, known by their numbers. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.integration.clients import token_ids

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
EOS = (0, 2)
WORDS = (
    *(
        "The quick",
        " brown",
        " fox",
        " jumps",
        "\n",
        " été",
        "冬",
        " 🍂",
        "👩‍👩‍👧",
        "e\u0301",
        " of",
    ),
    *(
        " def relay(blocks):",
        " return",
        " 0123",
        "<|im_end|>",
        "</tool_call>",
        " France?",
        "\t",
        '"',
    ),
)
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["été", "冬", "🍂"]},
        "year": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
DOCUMENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "counts"],
    "additionalProperties": False,
}
WORDLIST: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{6}$"},
    "minItems": 30,
    "maxItems": 30,
}
GBNF = 'root ::= "<" word ("," word)* ">"\nword ::= [a-z] [a-z]+'
MARKED = (
    r'[a-z<\n]{0,5}(<tool_call>\n?\{"name": "(season|now|nope)", "arguments": '
    r'(\{\}|\{"kind": "[a-z冬🍂]{0,3}"\}|[a-z]?)\}\n?(</tool_call>)?[a-z\n]{0,3}){1,3}'
    r"[a-z<_]{0,9}"
)
"""Calls that a parser finds though nobody made sure that they are any, and some that are none."""
THOUGHT = r"<think>\n?[a-z<]{0,12}(</think>|</th)?\n{0,2}"
CALLS = [
    {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    for name, arguments in (("season", '{"kind": "冬"}'), ("now", "{}"))
]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_now", "content": "12:00"},
    {"role": "tool", "tool_call_id": "call_season", "content": [{"type": "text", "text": "🍂"}]},
]


@dataclass(frozen=True)
class Drawn:
    """One request. `at` and `stops` say where in the answer that it would have its stops are cut
    from: a stop string may begin and end within a token, or within what looks like one character.
    """

    number: int
    path: str
    body: dict[str, Any]
    stops: tuple[tuple[float, int], ...] = ()
    """Of each string where it begins, as a share of the text, and its characters."""
    stop_ids: tuple[float, ...] = ()
    """Of each id where the answer has it, as a share of the tokens."""

    @property
    def tries(self) -> bool:
        return bool(self.stops or self.stop_ids)

    def tried(self) -> dict[str, Any]:
        """What is asked to know the answer without its stops: that of one choice."""
        several = ("n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs")
        left = {name: value for name, value in self.body.items() if name not in several}
        return {**left, "return_token_ids": True}

    def stopped(self, text: str, ids: Sequence[int]) -> dict[str, Any]:
        """The body with stops cut from an answer."""
        cuts = [(int(share * len(text)), length) for share, length in self.stops]
        found = [stop for start, length in cuts if (stop := text[start : start + length])]
        more: dict[str, Any] = {}
        if found:
            more["stop"] = found[0] if len(found) == 1 else found
        if self.stop_ids and ids:
            more["stop_token_ids"] = [ids[int(share * len(ids))] for share in self.stop_ids]
        return {**self.body, **more}


def drawn(number: int, *, long: bool = False) -> Drawn:
    """`long`: an answer that goes on for some time, so that something can happen meanwhile."""
    rng = random.Random(f"corpus {number}")
    chat = rng.random() < 0.5
    body = _sampled(rng)
    if chat:
        body |= _conversation(rng)
    else:
        body |= _prompts(rng)
    formed = _form(rng, chat) if rng.random() < 0.4 else {}
    body |= formed
    if not formed:
        body |= _kept(rng)
    _limit(rng, body, chat=chat, long=long, formed=bool(formed))
    stops, stop_ids = _stops(rng, body, from_share=0.7 if long else 0.1)
    if body.get("max_tokens") == 0:
        stops, stop_ids = (), ()
    return Drawn(number, CHAT if chat else TEXT, body, stops, stop_ids)


def thoughtful(number: int) -> Drawn:
    """One whose answer often begins with reasoning."""
    rng = random.Random(f"thoughtful {number}")
    form = rng.choice(["", THOUGHT, THOUGHT]) + MARKED
    body = {**_sampled(rng), **_conversation(rng), "structured_outputs": {"regex": form}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("season", "now")]
    _maybe(rng, body, 0.7, tools=tools)
    body["max_tokens"] = rng.choice([10, 30, 100, 200, 200])
    return Drawn(number, CHAT, body, *_stops(rng, body, from_share=0.1))


def _stops(
    rng: random.Random, body: dict[str, Any], from_share: float
) -> tuple[tuple[tuple[float, int], ...], tuple[float, ...]]:
    """As `Drawn` has them, not too near to the beginning."""
    stops: tuple[tuple[float, int], ...] = ()
    stop_ids: tuple[float, ...] = ()
    if rng.random() < 0.4:
        count = rng.randint(1, 3)
        stops = tuple((rng.uniform(from_share, 1), rng.randint(1, 6)) for _ in range(count))
        _maybe(rng, body, 0.5, include_stop_str_in_output=rng.random() < 0.8)
    if rng.random() < 0.15:
        stop_ids = (rng.uniform(from_share, 1),)
        _maybe(rng, body, 0.3, include_stop_str_in_output=True)
    return stops, stop_ids


def _maybe(rng: random.Random, body: dict[str, Any], chance: float, **fields: Any) -> None:
    if rng.random() < chance:
        body |= fields


def _sampled(rng: random.Random) -> dict[str, Any]:
    """What both routes take and goes with everything."""
    body: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.3, 0.8, 1, 1, 1.5, 2])}
    _maybe(rng, body, 0.9 if body["temperature"] else 0.4, seed=rng.randint(-(2**63), 2**63 - 1))
    if "seed" not in body:
        body["temperature"] = 0
    _maybe(rng, body, 0.3, top_p=rng.choice([0.1, 0.5, 0.9, 1]))
    _maybe(rng, body, 0.3, top_k=rng.choice([-1, 0, 1, 5, 40, 511]))
    _maybe(rng, body, 0.2, min_p=rng.choice([0, 0.02, 0.2, 1]))
    _maybe(rng, body, 0.25, presence_penalty=rng.uniform(-2, 2))
    _maybe(rng, body, 0.25, frequency_penalty=rng.uniform(-2, 2))
    _maybe(rng, body, 0.25, repetition_penalty=rng.uniform(0.5, 2))
    biased = [*token_ids(rng, rng.randint(1, 6)), *rng.sample(EOS, rng.randint(0, 2))]
    _maybe(rng, body, 0.25, logit_bias={str(id): rng.uniform(-100, 20) for id in biased})
    _maybe(rng, body, 0.3, n=rng.randint(1, 3))
    _maybe(rng, body, 0.2, prompt_logprobs=rng.choice([0, 1, 3, 20]))
    _maybe(rng, body, 0.3, skip_special_tokens=rng.random() < 0.3)
    _maybe(rng, body, 0.15, truncate_prompt_tokens=rng.choice([-1, 1, 7, 40]))
    _maybe(rng, body, 0.4, return_token_ids=rng.random() < 0.9)
    _maybe(rng, body, 0.2, priority=rng.randint(-3, 3))
    _maybe(rng, body, 0.2, cache_salt=rng.choice(["a", "salt 🧂"]))
    _maybe(rng, body, 0.1, user="u-1", metadata={"team": "t"})
    usage = {"include_usage": rng.random() < 0.9}
    _maybe(rng, usage, 0.4, continuous_usage_stats=True)
    _maybe(rng, body, 0.85, stream_options=usage)  # of the streams alone
    return body


def _kept(rng: random.Random) -> dict[str, Any]:
    """What does not go with a grammar."""
    body: dict[str, Any] = {}
    _maybe(rng, body, 0.35, ignore_eos=True)
    _maybe(rng, body, 0.25, min_tokens=rng.randint(0, 30))
    few = [*token_ids(rng, rng.randint(6, 60)), *rng.sample(EOS, rng.randint(0, 1))]
    _maybe(rng, body, 0.12, allowed_token_ids=few)
    _maybe(rng, body, 0.2, bad_words=[rng.choice(WORDS), *rng.sample("aeiou tn\n", 2), " of the"])
    if "bad_words" in body:
        body["bad_words"] = [word for word in body["bad_words"] if word.strip(" ")]
    return body


def _limit(
    rng: random.Random, body: dict[str, Any], *, chat: bool, long: bool, formed: bool
) -> None:
    """How long the answer may be, and that much is drawn."""
    most = rng.randint(100, 200) if long else rng.choice([1, 2, 5, 10, 20, 40, 60])
    if formed:
        most = 300 if long else rng.choice([3, 30, 100, 200])
    elif long:
        body |= {"ignore_eos": True}
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], most)
    if chat:
        body[rng.choice(["max_tokens", "max_completion_tokens"])] = most
        _maybe(rng, body, 0.1, max_tokens=most, max_completion_tokens=most)
    elif long or formed or body.get("min_tokens", 0) > 16 or rng.random() < 0.9:
        body["max_tokens"] = most
    if body.get("echo") and not body.get("min_tokens") and not long:
        _maybe(rng, body, 0.25, max_tokens=0)


def _text(rng: random.Random, words: int) -> str:
    return "".join(rng.choices(WORDS, k=words))


def _prompts(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {}
    count, length = rng.randint(1, 3), rng.choice([1, 5, 30, 80])
    body["prompt"] = rng.choice(
        (
            _text(rng, length),
            token_ids(rng, length),
            [_text(rng, rng.randint(1, length)) for _ in range(count)],
            [token_ids(rng, rng.randint(1, length)) for _ in range(count)],
        )
    )
    _maybe(rng, body, 0.4, logprobs=rng.choice([0, 1, 3, 5]))
    _maybe(rng, body, 0.3, echo=rng.random() < 0.9)
    _maybe(rng, body, 0.2, best_of=rng.randint(3, 4))
    _maybe(rng, body, 0.1, suffix="")
    return body


def _conversation(rng: random.Random) -> dict[str, Any]:
    first = {"role": rng.choice(["system", "developer"]), "content": _text(rng, rng.randint(0, 20))}
    turn = {"role": "user", "content": _content(rng)}
    messages: list[dict[str, Any]] = [first] if rng.random() < 0.5 else []
    messages.append(turn if rng.random() < 0.7 else {**turn, "name": "Ann"})
    body: dict[str, Any] = {"messages": messages}
    kind = rng.choice(["plain", "plain", "open", "called", "asked"])
    if kind == "open":
        thought = {"reasoning_content": "hm"} if rng.random() < 0.5 else {"reasoning": "hm"}
        messages.append({"role": "assistant", "content": _content(rng), **thought})
        body["continue_final_message"] = True
        _maybe(rng, body, 0.5, add_generation_prompt=False)
    elif kind == "called":
        messages += [{"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS]
    elif kind == "asked":
        messages += [{"role": "assistant", "content": _content(rng)}, turn]
        _maybe(rng, body, 0.5, add_generation_prompt=rng.random() < 0.5)
    _maybe(rng, body, 0.2, chat_template_kwargs={"enable_thinking": False, "words": ["a", 1]})
    if rng.random() < 0.5:
        body["logprobs"] = rng.random() < 0.8
        if body["logprobs"]:
            _maybe(rng, body, 0.7, top_logprobs=rng.choice([0, 1, 5, 20]))
    return body


def _content(rng: random.Random) -> Any:
    text = _text(rng, rng.randint(1, 25)).strip() or "a"
    return rng.choice([text, [{"type": "text", "text": text}, {"type": "text", "text": "b"}]])


def _form(rng: random.Random, chat: bool) -> dict[str, Any]:
    """What the answer must be: a grammar of the client's own, or calls of tools."""
    if chat and rng.random() < 0.65:
        return _tools(rng)
    schema, pattern = rng.choice([DOCUMENT, WORDLIST]), "[0-9]{3}(-[a-f]{2,4}|é🍂)+"
    named = {"name": "n", "schema": schema, "strict": True}
    formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}]
    outputs: list[dict[str, Any]] = [{"json": schema}, {"json": json.dumps(schema)}]
    outputs += [{"regex": pattern}, {"grammar": GBNF}, {"json_object": True}]
    outputs += [{"choice": ["yes", "no", "ça va"]}]
    return rng.choice(
        (
            {"response_format": rng.choice(formats)},
            {"structured_outputs": rng.choice(outputs)},
            {"guided_json": schema},
            {"guided_regex": pattern},
            {"guided_choice": ["冬", "🍂", "yes"]},
            {"guided_grammar": GBNF},
        )
    )


def _tools(rng: random.Random) -> dict[str, Any]:
    strict = rng.random() < 0.5
    function = {"name": "season", "description": "Which 🍂?", "parameters": ARGUMENTS}
    season = {"type": "function", "function": {**function, "strict": strict}}
    now = {"type": "function", "function": {"name": "now"}}
    body: dict[str, Any] = {"tools": rng.choice([[season], [season, now], [now, season]])}
    named = {"type": "function", "function": {"name": "season"}}
    kind = rng.choice(["free", "marked", "marked", "must", "must", "must"])
    if kind == "must":
        _maybe(rng, body, 0.9, tool_choice=rng.choice(["required", "required", named]))
        _maybe(rng, body, 0.4, parallel_tool_calls=rng.random() < 0.5)
        _maybe(rng, body, 0.2, response_format={"type": "json_object"})
    elif kind == "marked":
        body |= {"structured_outputs": {"regex": MARKED}}
        _maybe(rng, body, 0.7, tool_choice=rng.choice(["none", "auto", "auto"]))
    else:
        season["function"]["strict"] = False
        _maybe(rng, body, 0.7, tool_choice=rng.choice(["none", "auto"]))
        body |= _kept(rng)
    return body
