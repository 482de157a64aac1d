"""A model's vocabulary as llguidance needs it: true bytes, control tokens, what ends an answer.

Bytes that a grammar leaves no choice about are tokenized by the model's own tokenizer, and the mask
allows that one token: a model that may cut a name in any way often cuts it in a way it never saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvrelay.shared.errors import RequestError

if TYPE_CHECKING:  # who checks grammars needs no tokenizer, who hands one on no grammars
    from llguidance import LLTokenizer

    from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""The ids of a text in mid-answer; any that have other bytes mean that it does not know them."""

_MARK = "\x02"
"""Put before a text, so that no tokenizer takes its beginning for the beginning of a line."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[bytes, ...]
    """By id; ids without a token have no bytes."""
    control: tuple[int, ...]
    """No grammar allows them, unless it names them."""
    ends: tuple[int, ...]
    """Allowed where the grammar accepts what is there."""

    @staticmethod
    def of(tokenizer: TokenizerInfo, limit: int) -> Vocabulary:
        """Without the ids from `limit` on, which the model does not have."""
        ids = range(min(limit, tokenizer.vocab_size))
        return Vocabulary(
            tuple(tokenizer.token_bytes(id) for id in ids),
            tuple(sorted(id for id in tokenizer.special_ids if id in ids)),
            tuple(id for id in tokenizer.special.eos_token_ids if id in ids),
        )

    def to_json(self) -> bytes:
        texts = [token.decode("latin-1") for token in self.tokens]
        return json.dumps([texts, self.control, self.ends]).encode()

    @staticmethod
    def from_json(data: bytes) -> Vocabulary:
        texts, control, ends = json.loads(data)
        tokens = tuple(text.encode("latin-1") for text in texts)
        return Vocabulary(tokens, tuple(control), tuple(ends))


class _Wrapper:
    """What the library asks for, by the names it asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.control
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else None
        self.bos_token_id = None
        self.greedy: Encode
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Ids with exactly the bytes of the text: with others the library would go astray."""
        if self._encode is not None:
            ids = self._encode(text)
            if b"".join([self.tokens[id] for id in ids if id < len(self.tokens)]) == text.encode():
                return list(ids)
        return list(self.greedy(text))


def build(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """Takes a fifth of a second for 50,000 tokens. `encode` is not needed to check a grammar."""
    from llguidance import LLTokenizer

    wrapper = _Wrapper(vocabulary, encode)
    ends = list(vocabulary.ends) or None
    built = LLTokenizer(wrapper, eos_token=ends)  # type: ignore[arg-type]
    wrapper.greedy = built.greedy_tokenize
    return built


def in_mid_answer(tokenizer: TokenizerInfo) -> Encode:
    """How the tokenizer cuts a text that follows other text."""
    mark = tokenizer.encode_guarded(_MARK)

    def encode(text: str) -> Sequence[int]:
        try:
            ids = tokenizer.encode_guarded(_MARK + tokenizer.guard(text))
        except RequestError:  # it holds what cannot be told from a control token
            return []
        return ids[len(mark) :] if ids[: len(mark)] == mark else []

    return encode
