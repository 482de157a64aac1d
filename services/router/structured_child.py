"""A process that checks grammars for a router, one at a time: what explodes takes nobody with it.

    python -m kvrelay.services.router.structured_child

Messages are JSON behind their length in four bytes. First comes the vocabulary; then each request
for a grammar is answered by it, or by what is wrong. It ends with its input.

Each is compiled in a fork of its own, which the system ends after a fixed time of computing,
however busy the machine is. So a refusal takes no longer than that, and the next grammar finds a
process that has the vocabulary already.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, BinaryIO, Final

from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.compile import compiled, serialize, try_out
from kvrelay.shared.grammar.vocabulary import Vocabulary, build
from kvrelay.shared.types import GrammarKind

NICE: Final = 5
MAX_BYTES: Final = 2 << 30
"""Of address space, where the system counts that."""
COMPUTE_S: Final = 0.3
"""Of a processor's time, for one grammar: most take a millisecond, the largest some dozens."""
SLOW: Final = f"too complex: compiling it takes more than {COMPUTE_S:g} s"
LARGE: Final = "too complex: compiling it took too much memory"


def main() -> None:
    os.nice(NICE)
    _limit_memory()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the replies
    requests = sys.stdin.buffer
    tokenizer = build(Vocabulary.from_json(_read(requests)))
    _write(replies, {})
    while data := _read(requests):
        _write(replies, _apart(tokenizer, data))


def _apart(tokenizer: Any, data: bytes) -> dict[str, str]:
    """The answer of a fork. Without `grammar` and `problem` nothing is known of the grammar."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        signal.setitimer(signal.ITIMER_PROF, COMPUTE_S)  # SIGPROF ends it
        with os.fdopen(theirs, "wb") as out:
            out.write(json.dumps(_answer(tokenizer, data)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answers:
        answer = answers.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        reply: dict[str, str] = json.loads(answer)
        return reply
    if code == -signal.SIGPROF:
        return {"problem": SLOW}
    return {} if code in (-signal.SIGKILL, -signal.SIGTERM) else {"problem": LARGE}


def _answer(tokenizer: Any, data: bytes) -> dict[str, str]:
    kind, text, around = json.loads(data)
    try:
        grammar = serialize(GrammarKind(kind), text, around)
        try_out(compiled(tokenizer, grammar, lenient=kind == GrammarKind.CALLS))
    except BadGrammar as error:
        return {"problem": str(error)}
    return {"grammar": grammar}


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
