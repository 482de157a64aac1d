"""A worker's grammars: compiled where nobody waits, each at hand for the legs that are here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.matcher import Matcher
from kvrelay.shared.grammar.vocabulary import Vocabulary, build, in_mid_answer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Compiled grammars that are kept for the next leg that has the same."""


def grammar_store(tokenizer: TokenizerInfo, vocab: int) -> GrammarStore:
    """For a model that has so many ids."""
    return GrammarStore(lambda: build(Vocabulary.of(tokenizer, vocab), in_mid_answer(tokenizer)))


class GrammarStore:
    """May be used from any thread; each matcher by one at a time."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """`tokenizer` builds it; called once, for the first grammar."""
        self._build = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}

    def open(self, key: str, grammar: str, seen: Sequence[int]) -> None:
        """Have a matcher that was told `seen` for the rows of that key. Raises `BadGrammar`."""
        from kvrelay.shared.grammar.compile import compiled  # the library, for who asks for it

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            fresh = self._compiled.get(grammar)
            if fresh is None:
                fresh = self._compiled[grammar] = compiled(self._tokenizer, grammar, lenient=True)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            vocab = self._tokenizer.vocab_size
            matcher = Matcher(fresh.deep_copy(), vocab)
        if not all(0 <= token < vocab for token in seen):
            raise BadGrammar(f"a token that was seen is outside the vocabulary of {vocab}")
        matcher.advance(seen)
        self._matchers[key] = matcher

    def get(self, key: str) -> Matcher | None:
        return self._matchers.get(key)

    def close(self, key: str) -> None:
        """Its leg is over. Idempotent."""
        self._matchers.pop(key, None)
