"""What is asked of a system, and the figures of one visit. Prompts never share a prefix."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtests.serving.client import (
    Answer,
    Exchange,
    Request,
    Server,
    ask,
    open_stream,
    read,
)
from loadtests.serving.figures import (
    Figures,
    gap_figures,
    tokens_within,
    ttft_figures,
    whole_figures,
)

STEADY_TOKENS = 8000
"""More than a steady stream can get before it is cut."""


class Prompts:
    """Random words of the vocabulary. The same seed gives the same prompts to every system."""

    def __init__(self, words: Sequence[int], seed: str) -> None:
        self._words = words
        self._order = random.Random(seed)

    def take(self, tokens: int) -> list[int]:
        return self._order.choices(self._words, k=tokens)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each scenario; tokens are prompt and answer."""

    requests: int = 8
    waves: int = 3
    steady: int = 4
    alone_s: float = 8.0
    longs: int = 5
    long_period_s: float = 4.0
    long_tokens: int = 2000


Outcome = tuple[dict[str, Figures], Sequence[Answer]]
"""Figures by row, and what they were made from."""

Scenario = Callable[[Server, Prompts, Sizes], Awaitable[Outcome]]


async def streams1(server: Server, prompts: Prompts, sizes: Sizes) -> Outcome:
    """One after the other, 32 in and 64 out."""
    begun_s = time.monotonic()
    answers = []
    for _ in range(sizes.requests):
        answers.append(read(await ask(server, Request(prompts.take(32), 64), time.monotonic())))
    return {"streams1": whole_figures(answers, begun_s)}, answers


async def streams8(server: Server, prompts: Prompts, sizes: Sizes) -> Outcome:
    """Waves of eight at once, 128 in and 64 out; a wave waits for the end of the one before."""
    begun_s = time.monotonic()
    exchanges: list[Exchange] = []
    for _ in range(sizes.waves):
        now_s = time.monotonic()
        requests = [Request(prompts.take(128), 64) for _ in range(8)]
        exchanges += await asyncio.gather(*(ask(server, r, now_s) for r in requests))
    answers = [read(exchange) for exchange in exchanges]
    return {"streams8": whole_figures(answers, begun_s)}, answers


async def gap(server: Server, prompts: Prompts, sizes: Sizes) -> Outcome:
    """Steady streams: alone for a while, then with a long prompt every few seconds."""
    steady = [
        await open_stream(server, Request(prompts.take(128), STEADY_TOKENS), time.monotonic())
        for _ in range(sizes.steady)
    ]
    longs = [Request(prompts.take(sizes.long_tokens), 16) for _ in range(sizes.longs)]
    await asyncio.gather(*(stream.started.wait() for stream in steady))
    alone_s = time.monotonic()
    loaded_s = alone_s + sizes.alone_s
    over_s = loaded_s + sizes.longs * sizes.long_period_s
    exchanges = await asyncio.gather(
        *(
            _at(loaded_s + n * sizes.long_period_s, server, request)
            for n, request in enumerate(longs)
        )
    )
    await _until(over_s)
    for stream in steady:
        stream.cut()
    await asyncio.gather(*(stream.closed.wait() for stream in steady))
    streams = [read(stream.exchange) for stream in steady]
    answers = [read(exchange) for exchange in exchanges]
    return gap_rows(streams, answers, (alone_s, loaded_s, over_s)), [*streams, *answers]


def gap_rows(
    steady: Sequence[Answer], longs: Sequence[Answer], window: tuple[float, float, float]
) -> dict[str, Figures]:
    """`window`: when the streams were alone, when long prompts began, when all ended (seconds)."""
    alone_s, loaded_s, over_s = window
    alone = gap_figures(steady, alone_s, loaded_s)
    load = gap_figures(steady, loaded_s, over_s)
    good = [answer for answer in longs if not answer.error]
    inside = sum(tokens_within(answer, loaded_s, over_s) for answer in (*steady, *good))
    before = sum(tokens_within(answer, alone_s, loaded_s) for answer in steady)
    broken = sum(not answer.cut for answer in steady)
    long_ttft = {f"long_{name}": value for name, value in ttft_figures(good).items()}
    return {
        "gap_alone": {
            "tokens": before,
            "tokens_per_s": before / (loaded_s - alone_s),
            **alone,
            "failures": broken,
        },
        "gap_load": {
            "tokens": inside,
            "tokens_per_s": inside / (over_s - loaded_s),
            **load,
            "gap_growth": load["gap_max_ms"] / alone["gap_max_ms"],
            **long_ttft,
            "failures": broken + len(longs) - len(good),
        },
    }


async def _at(when_s: float, server: Server, request: Request) -> Exchange:
    await _until(when_s)
    return await ask(server, request, when_s)


async def _until(when_s: float) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))


SCENARIOS: dict[str, Scenario] = {"streams1": streams1, "streams8": streams8, "gap": gap}
