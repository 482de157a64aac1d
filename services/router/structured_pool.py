"""Grammars, checked off the event loop and kept.

The library is quick and bounds itself, but it is asked things that nobody foresaw. So it runs in
processes of its own (`structured_child`), few, of low priority and bounded in memory and time. One
that does not answer, or dies, says nothing of a grammar: it is replaced, and the request may come
again. Whoever asks for no grammar, or for one that was asked for before, does not notice.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import IO, TypeAlias

from kvrelay.services.router.validate import ModelCard
from kvrelay.shared.errors import Overloaded, RequestError, Unavailable
from kvrelay.shared.grammar.vocabulary import Vocabulary
from kvrelay.shared.types import Constraint, ValidRequest

_COMMAND = (sys.executable, "-m", "kvrelay.services.router.structured_child")
_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    processes: int = 2
    check_s: float = 4.0
    """Longest wait for an answer, which takes a fraction of it unless the machine is too busy."""
    queue_s: float = 5.0
    """Longest wait for a process; then it is a 429."""
    start_s: float = 20.0
    kept: int = 512
    kept_bytes: int = 32 << 20
    """Of answers that are kept, refusals too, with what was asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    grammar: str
    problem: str
    """Why there is none."""


class Grammars:
    """For one model. The first request for a grammar starts a process; `close` ends them."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._turns = asyncio.Semaphore(self._limits.processes)
        self._threads = ThreadPoolExecutor(self._limits.processes, "grammars")
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._asked: dict[_Key, asyncio.Task[Answer]] = {}
        self._kept: OrderedDict[_Key, Answer] = OrderedDict()
        self._kept_bytes = 0

    async def grammar(self, asked: Constraint, card: ModelCard) -> str:
        """Raises `RequestError` naming the field, `Overloaded`, or `Unavailable`."""
        key = (asked.kind.value, asked.text, asked.around)
        answer = self._kept.get(key)
        if answer is None:
            task = self._asked.get(key)
            if task is None:
                task = self._asked[key] = asyncio.create_task(self._check(key, card))
                task.add_done_callback(lambda done: self._answered(key, done))
            answer = await asyncio.shield(task)  # others may wait for the same
        else:
            self._kept.move_to_end(key)
        if answer.problem:
            raise RequestError(
                f"{asked.param}: {answer.problem}", param=asked.param, code="invalid_value"
            )
        return answer.grammar

    def close(self) -> None:
        """Idempotent. It takes as long as killing a process does."""
        for task in self._asked.values():
            task.cancel()
        for child in self._children:
            child.kill()
        self._children.clear()
        self._idle.clear()
        self._threads.shutdown()

    def _answered(self, key: _Key, task: asyncio.Task[Answer]) -> None:
        del self._asked[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[key] = task.result()
        self._kept_bytes += _size(key, task.result())
        while len(self._kept) > self._limits.kept or self._kept_bytes > self._limits.kept_bytes:
            oldest, answer = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest, answer)

    async def _check(self, key: _Key, card: ModelCard) -> Answer:
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await self._turns.acquire()
        except TimeoutError:
            message = f"No grammar could be checked for {self._limits.queue_s:g} s"
            raise Overloaded(message, retry_after_s=self._limits.queue_s) from None
        try:
            child = self._living() or await self._start(card)
            question = json.dumps(key).encode()
            try:
                reply = await self._within(self._limits.check_s, child, child.ask, question)
            except TimeoutError:
                message = "The machine is too busy to check a grammar"
                raise Overloaded(message, retry_after_s=self._limits.check_s) from None
            except (EOFError, OSError) as error:
                raise Unavailable("The process that checked the grammar died") from error
            self._idle.append(child)
            if not reply:
                raise Unavailable("What checked the grammar was killed")
            return Answer(reply.get("grammar", ""), reply.get("problem", ""))
        finally:
            self._turns.release()

    def _living(self) -> _Child | None:
        """One that waits for a grammar and has not died of it."""
        while self._idle:
            child = self._idle.pop()
            if child.lives:
                return child
            self._children.discard(child)
            child.kill()
        return None

    async def _start(self, card: ModelCard) -> _Child:
        def begin() -> dict[str, str]:
            return child.ask(Vocabulary.of(card.tokenizer, card.vocab_size).to_json())

        loop = asyncio.get_running_loop()
        child = await loop.run_in_executor(self._threads, _Child)
        self._children.add(child)
        try:
            await self._within(self._limits.start_s, child, begin)
        except (TimeoutError, EOFError, OSError) as error:
            raise Unavailable("Grammars cannot be checked now") from error
        return child

    async def _within(
        self, seconds: float, child: _Child, act: Callable[..., dict[str, str]], *args: bytes
    ) -> dict[str, str]:
        """What it replies; unless it does in time the process is gone, for nobody knows what it
        is at. Raises `TimeoutError`, and `EOFError` or `OSError` when it died."""
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._threads, partial(act, *args))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(working)
        except BaseException:
            self._children.discard(child)
            child.kill()  # which ends the wait of its thread
            await asyncio.gather(working, return_exceptions=True)
            raise


async def with_grammar(request: ValidRequest, grammars: Grammars, card: ModelCard) -> ValidRequest:
    """The request with its grammar in each leg's sampling. Raises what `Grammars.grammar` does."""
    if request.constraint is None:
        return request
    grammar = await grammars.grammar(request.constraint, card)
    legs = tuple(
        replace(leg, sampling=replace(leg.sampling, grammar=grammar)) for leg in request.legs
    )
    return replace(request, legs=legs)


def _size(key: _Key, answer: Answer) -> int:
    return len(key[1]) + len(key[2]) + len(answer.grammar) + len(answer.problem)


class _Child:
    """Used by one thread at a time, and killed by any.

    Not by the event loop's own means: it forks, and gRPC's handlers around a fork do not always
    survive that. What is used here does without them.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(_COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def ask(self, message: bytes) -> dict[str, str]:
        """Raises `EOFError` or `OSError` when it is gone."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        requests.write(len(message).to_bytes(4) + message)
        requests.flush()
        size = int.from_bytes(_exactly(replies, 4))
        reply: dict[str, str] = json.loads(_exactly(replies, size))
        return reply

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # what it did not read any more
                self._process.stdin.close()


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
