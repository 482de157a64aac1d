"""From tokens to text, one machine for each leg: true bytes in, text deltas out.

Only two things hold text back: a UTF-8 character that is not complete yet, and a suffix that may
become a stop string. A stop string is found in the text, not in tokens, and counts when it is
complete: of several the one that ends first wins, of those that end together the longest. So the
text does not depend on how it was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence, Set

_REPLACING = codecs.getincrementaldecoder("utf-8")


class LegText:
    """Feed each ordinary token once and in order, then `finish`. After a stop all of it is ""."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden: Set[int],
        stop: Sequence[str] = (),
        unsearched_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """`hidden` ids (control tokens) are no text. Stops are not looked for in the text of the
        first `unsearched_tokens` tokens: a request's `min_tokens`. With `include_stop` the text
        ends behind the stop string, so that nothing is held back for it."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._stop = tuple(stop)
        self._unsearched_tokens = unsearched_tokens
        self._include_stop = include_stop
        self._decoder = _REPLACING(errors="replace")
        self._held = ""
        """May begin a stop; with `include_stop` it was shown all the same."""
        self.characters = 0
        """Of all tokens so far: those held back, and those of a stop, included."""
        self.stopped = False
        """A stop string was met; the text before it is complete."""

    def feed(self, token: int) -> str:
        """The text that became certain with this token, often all of its own."""
        if self.stopped:
            return ""
        data = b"" if token in self._hidden else self._token_bytes(token)
        text = self._decoder.decode(data)
        self.characters += len(text)
        if self._unsearched_tokens > 0:
            self._unsearched_tokens -= 1
            return text
        return self._search(text) if self._stop else text

    def finish(self) -> str:
        """What was held back: no more tokens come. A character that was cut off becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._decoder.decode(b"", final=True)
        self.characters += len(text)
        text = self._search(text) if text and self._stop else text
        held, self._held = self._held, ""
        return text if self._include_stop else text + held

    def _search(self, text: str) -> str:
        shown = len(self._held) if self._include_stop else 0
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            end, start = min(ends)
            return text[shown : end if self._include_stop else start]
        cut = min((_partial(text, stop) for stop in self._stop), default=len(text))
        self._held = text[cut:]
        return text[shown:] if self._include_stop else text[:cut]


def _partial(text: str, stop: str) -> int:
    """Where the longest suffix of `text` begins that is a proper prefix of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at
