"""Seeded load: questions whose right answers are known, and clients of whom some leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvrelay.services.chaos.client import Answer, Leave, NotAccepted, Place, ask
from kvrelay.services.chaos.cluster import ChaosCluster
from kvrelay.services.chaos.watch import free_s
from kvrelay.shared.chaos.decide import fraction

QUESTIONS = 48
PREFIXES = 4
AWAY_S = 60.0
"""Longest that a router is waited for."""
SLOW_S = 5.0
FREE_SAMPLE = 3
"""Of so many clients that leave, one is watched until its blocks are free."""
_TEXT = "the relay of blocks from one worker to another may be late lost doubled or wrong"


@dataclass(frozen=True, slots=True)
class Question:
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body["n"])


def questions(model: str, seed: int, count: int) -> list[Question]:
    """Greedy and sampled, short and long, with shared beginnings, one or two choices, stops."""
    rng = random.Random(seed)
    vocabulary = _TEXT.split()

    def words(count: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(count))

    prefixes = [words(60) for _ in range(PREFIXES)]
    out = []
    for number in range(count):
        prompt = words(rng.randint(3, 90))
        if rng.random() < 0.4:
            prompt = f"{rng.choice(prefixes)} {prompt}"
        body: dict[str, Any] = {
            "model": model,
            "prompt": f"{number}: {prompt}",
            "max_tokens": rng.randint(2, 40) if rng.random() < 0.7 else rng.randint(100, 300),
            "n": rng.choice((1, 1, 1, 2)),
            "seed": rng.randrange(2**31),
            "temperature": rng.choice((0.0, 0.8, 1.0)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if rng.random() < 0.2:
            body["stop"] = ["e "]
        out.append(Question(body))
    return out


async def right_answers(place: Place, asked: list[Question]) -> list[Answer]:
    """Of a server that nobody disturbs."""
    gate = asyncio.Semaphore(8)

    async def one(question: Question) -> Answer:
        async with gate:
            answer = await ask(place, question.body)
        if answer.error or answer.ends != 1:
            raise RuntimeError(f"the undisturbed server did not answer: {answer.error}")
        return answer

    return list(await asyncio.gather(*map(one, asked)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the load."""

    requests: int
    clients: int
    """At a time, at most."""
    over_s: float = 0.0
    """The requests begin spread over so long; 0 is as fast as they are answered."""


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    accepted: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """full, left, refused, failed, router_lost."""
    wrong: list[str] = field(default_factory=list)
    ended_twice: list[str] = field(default_factory=list)
    never_ended: list[str] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    free_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    slow: list[str] = field(default_factory=list)
    """What took longest, for people to look into."""

    @property
    def done(self) -> int:
        return sum(self.ends.values())

    @property
    def stayed(self) -> int:
        """Those whose client stayed, and whose router did, too."""
        return self.ends["full"] + self.ends["failed"] + self.ends["refused"]

    @property
    def full_share(self) -> float:
        return self.ends["full"] / self.stayed if self.stayed else 1.0


def wrong_token(question: Question, answer: Answer, right: Answer) -> str:
    """Where an answer, or as much of it as there is, is not the undisturbed one; else empty."""
    for choice in range(question.choices):
        got, expected = answer.texts.get(choice, ""), right.texts.get(choice, "")
        if answer.finishes.get(choice):
            if (got, answer.finishes[choice]) != (expected, right.finishes[choice]):
                return f"choice {choice}: {got!r} instead of {expected!r}"
        elif not expected.startswith(got):
            return f"choice {choice}: {got!r} does not begin {expected!r}"
    if answer.tokens >= 0 and answer.tokens != right.tokens:
        return f"usage of {answer.tokens} tokens instead of {right.tokens}"
    return ""


@dataclass(slots=True)
class Load:
    """Clients that ask one question after the other, until all are done."""

    cluster: ChaosCluster
    asked: list[Question]
    right: list[Answer]
    seed: int
    cancels: float
    tally: Tally = field(default_factory=Tally)
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, shape: Shape, tick: Callable[[int], None]) -> None:
        numbers = iter(range(shape.requests))
        begun_s = time.monotonic()

        async def client() -> None:
            for number in numbers:
                due_s = begun_s + number * shape.over_s / shape.requests
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await self._one(number)
                tick(self.tally.done)

        async with asyncio.TaskGroup() as group:
            for _ in range(shape.clients):
                group.create_task(client())
        await asyncio.gather(*self._watching)

    async def _one(self, number: int) -> None:
        which = int(fraction(self.seed, "question", number) * len(self.asked))
        question, right = self.asked[which], self.right[which]
        leave = self._leave(number, question)
        kills = len(self.cluster.router.killed_ns)
        answer, took_s = await self._accepted(question, leave)
        tally, name = self.tally, f"request {number} ({answer.request_id})"
        tally.accepted += answer.status == 200
        tally.slowest_s = max(tally.slowest_s, took_s)
        if took_s > SLOW_S:
            tally.slow.append(f"{took_s:.2f} s for {name}")
        if problem := wrong_token(question, answer, right):
            tally.wrong.append(f"{name}: {problem}")
        if answer.left:
            tally.ends["left"] += 1
            if answer.request_id and tally.ends["left"] % FREE_SAMPLE == 0:
                self._watch_free(answer.request_id)
            return
        lost = len(self.cluster.router.killed_ns) > kills
        self._judge(question, answer, name, lost)

    def _judge(self, question: Question, answer: Answer, name: str, lost: bool) -> None:
        tally = self.tally
        finishes = [len(answer.finishes.get(choice, ())) for choice in range(question.choices)]
        if answer.ends > 1 or max(finishes) > 1:
            tally.ended_twice.append(name)
        if answer.ends == 0 and not lost:
            tally.never_ended.append(f"{name}: {answer.error or 'closed without an end'}")
        if answer.ends == 1 and not answer.error and finishes == [1] * question.choices:
            tally.ends["full"] += 1
            return
        tally.problems[answer.error or "not whole"] += 1
        if answer.ends == 0 and lost:
            tally.ends["router_lost"] += 1
        else:
            tally.ends["refused" if answer.status in (429, 503) else "failed"] += 1

    async def _accepted(self, question: Question, leave: Leave | None) -> tuple[Answer, float]:
        """Asks again only where no router was there to be asked, or it said that it was going.

        Also what the answer took since it was asked for the last time.
        """
        begun_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            try:
                answer = await ask(self.cluster.url, question.body, leave)
            except NotAccepted as error:
                if time.monotonic() - begun_s > AWAY_S:
                    return Answer(error=f"no router: {error}"), AWAY_S
            else:
                here = self.cluster.router.up
                asked = answer.status not in (0, 503) or here
                if asked or time.monotonic() - begun_s > AWAY_S:
                    return answer, time.monotonic() - asked_s
            await asyncio.sleep(0.1)

    def _leave(self, number: int, question: Question) -> Leave | None:
        if fraction(self.seed, "leaves", number) >= self.cancels:
            return None
        when = fraction(self.seed, "when", number)
        if when < 0.3:  # before its first token, most likely
            return Leave(1 << 30, 0.001 + when * 0.2)
        return Leave(1 + int(when * question.body["max_tokens"]), 30.0)

    def _watch_free(self, request_id: str) -> None:
        async def watch() -> None:
            took_s, held = await free_s(self.cluster, request_id)
            self.tally.free_s.append(took_s)
            if took_s > 1.0:
                self.tally.slow.append(f"{took_s:.2f} s to free {request_id}: {sorted(held)}")

        task = asyncio.create_task(watch())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
