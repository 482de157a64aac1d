"""A process that checks grammars for a router, one at a time: what explodes takes nobody with it.

    python -m kvrelay.services.router.structured_child

Messages are JSON behind their length in four bytes. First comes the vocabulary; then each request
for a grammar is answered by it, or by what is wrong. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import BinaryIO

from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.compile import compiled, serialize, try_out
from kvrelay.shared.grammar.vocabulary import Vocabulary, build
from kvrelay.shared.types import GrammarKind

NICE = 5
MAX_BYTES = 2 << 30
"""Of address space, where the system counts that."""


def main() -> None:
    os.nice(NICE)
    _limit_memory()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the replies
    requests = sys.stdin.buffer
    tokenizer = build(Vocabulary.from_json(_read(requests)))
    _write(replies, {})
    while data := _read(requests):
        kind, text, around = json.loads(data)
        try:
            grammar = serialize(GrammarKind(kind), text, around)
            try_out(compiled(tokenizer, grammar, lenient=kind == GrammarKind.CALLS))
            _write(replies, {"grammar": grammar})
        except BadGrammar as error:
            _write(replies, {"problem": str(error)})


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on this system
        return
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


def _read(stream: BinaryIO) -> bytes:
    """Empty at the end of input."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head)) if len(head) == 4 else b""


def _write(stream: BinaryIO, reply: dict[str, str]) -> None:
    data = json.dumps(reply).encode()
    stream.write(len(data).to_bytes(4) + data)
    stream.flush()


if __name__ == "__main__":
    main()
