"""The router's choice against being forced: `kvrelay up` unsplit, split, local and auto in turns.

Two kinds of work: a chat of ten turns, and prompts of several lengths with nothing and with four
answers running beside them. All systems run at the same time and one is loaded at a time; a block
visits each case in all of them in a random order, `auto` a second time for the resolution. Shown
are medians of the time to the first token, and the choice's ratio to the better forced one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop
from loadtests.serve_bench import words_of
from loadtests.serving.client import Answer, Exchange, Request, Server, ask, open_stream, read
from loadtests.serving.scenarios import Prompts
from loadtests.serving.systems import System, SystemFailed, kvrelay_spec, quiet
from rich.console import Console
from rich.table import Table

from kvrelay.shared.checkpoint.fetch import cache_dir, default_model_path
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer

MODES = {
    "unsplit": ("--unsplit",),
    "split": ("--route", "split"),
    "local": ("--route", "local"),
    "auto": (),
}
FORCED, AUTO, AGAIN = ("split", "local"), "auto", "auto again"
TURNS, QUESTION_TOKENS, ANSWER_TOKENS, SYSTEM_TOKENS = 10, 40, 60, 300
LENGTHS = {64: 4, 512: 3, 2000: 2}
"""Prompt tokens, and how often each is asked in one visit."""
STREAMS, STREAM_TOKENS = 4, 8000
NEXT_S = 0.25
"""Between an answer's end and the next question, as short as an agent's."""
Encode = Callable[[str], list[int]]
Case = Callable[[Server, Prompts, Encode], Coroutine[None, None, "Times"]]
Times = dict[str, list[float]]
"""Milliseconds to the first token, by case."""


def ttft_ms(answer: Answer) -> float:
    if answer.error or not answer.times_s:
        raise SystemFailed(f"a request failed: {answer.error or 'no token came'}")
    return 1e3 * answer.ttft_s


async def first_token(server: Server, prompt: list[int], max_tokens: int) -> float:
    return ttft_ms(read(await ask(server, Request(prompt, max_tokens), time.monotonic())))


def text_of(exchange: Exchange) -> str:
    body = b"".join(piece for _, piece in exchange.pieces).decode()
    data = (line.removeprefix("data: ") for line in body.splitlines())
    events = [json.loads(event) for event in data if event.startswith("{")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def chat(server: Server, prompts: Prompts, encode: Encode) -> Times:
    """Each turn's prompt is the last one, its answer's text as tokens, and a question."""
    prompt, times = prompts.take(SYSTEM_TOKENS), []
    for _ in range(TURNS):
        prompt += prompts.take(QUESTION_TOKENS)
        exchange = await ask(server, Request(prompt, ANSWER_TOKENS), time.monotonic())
        times.append(ttft_ms(read(exchange)))
        prompt += encode(text_of(exchange))
        await asyncio.sleep(NEXT_S)
    return {"chat turn 1": times[:1], "chat turns 2-10": times[1:]}


async def prompts_of(server: Server, prompts: Prompts, tokens: int) -> list[float]:
    times = []
    for _ in range(LENGTHS[tokens]):
        times.append(await first_token(server, prompts.take(tokens), 8))
        await asyncio.sleep(NEXT_S)
    return times


def idle(tokens: int) -> Case:
    async def case(server: Server, prompts: Prompts, encode: Encode) -> Times:
        return {f"{tokens} tokens, idle": await prompts_of(server, prompts, tokens)}

    return case


def among_streams(tokens: int) -> Case:
    async def case(server: Server, prompts: Prompts, encode: Encode) -> Times:
        requests = [Request(prompts.take(32), STREAM_TOKENS) for _ in range(STREAMS)]
        running = [await open_stream(server, request, time.monotonic()) for request in requests]
        try:
            for stream in running:
                await stream.started.wait()
            times = await prompts_of(server, prompts, tokens)
        finally:
            for stream in running:
                stream.cut()
                await stream.closed.wait()
        return {f"{tokens} tokens, {STREAMS} running": times}

    return case


PARTS: dict[str, list[Case]] = {
    "chat": [chat],
    "idle": [idle(tokens) for tokens in LENGTHS],
    "running": [among_streams(tokens) for tokens in LENGTHS],
}


async def measure(given: argparse.Namespace, console: Console, visits: dict[str, Times]) -> None:
    """Fills `visits`, by mode: what was measured outlives what goes wrong later.

    A case is visited in all modes, one right after the other.
    """
    words, tokenizer = words_of(given.model), load_tokenizer(given.model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, False)

    logs = cache_dir() / "routes_bench"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        systems = {}
        for mode in given.modes.split(","):
            flags = MODES[mode]
            spec = kvrelay_spec(["--model", str(given.model), *flags])
            system = systems[mode] = System(spec, logs / f"{mode}.log")
            stack.callback(system.stop)
            await system.start()
        for system in systems.values():
            await first_token(system.spec.server, Prompts(words, "warm").take(600), 32)
        names = [*systems, *([AGAIN] if AUTO in systems else [])]
        cases = [case for part in given.parts.split(",") for case in PARTS[part]]
        for block in range(given.blocks):
            await quiet([*systems.values()])
            for case in cases:
                console.print(f"block {block + 1} of {given.blocks}, case {cases.index(case) + 1}")
                order = random.Random(f"{given.seed} {block} {cases.index(case)}")
                for name in order.sample(names, len(names)):
                    prompts = Prompts(words, f"{given.seed} {block} {name} {cases.index(case)}")
                    server = systems[AUTO if name == AGAIN else name].spec.server
                    for row, times in (await case(server, prompts, encode)).items():
                        visits[name][row] += times


def show(visits: dict[str, Times], console: Console) -> None:
    visits = {name: times for name, times in visits.items() if times}
    compared = {AUTO, AGAIN, *FORCED} <= visits.keys()
    ratios = ("auto / better", "auto again / auto") if compared else ()
    table = Table("first token, median ms", *visits, *ratios)
    for case in list(visits.get(AUTO, {})):
        if not all(times[case] for times in visits.values()):
            continue
        medians = {name: median(times[case]) for name, times in visits.items()}
        row = [f"{ms:.0f}" for ms in medians.values()]
        if compared:
            better = min(medians[name] for name in FORCED)
            row += [f"{medians[AUTO] / better:.2f}", f"{medians[AGAIN] / medians[AUTO]:.2f}"]
        table.add_row(case, *row)
    console.print(table)


def main() -> int:
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--blocks", type=int, default=3, help="default: %(default)s")
    out.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    out.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of prompts and orders")
    out.add_argument("--model", type=Path, default=default_model_path())
    out.add_argument("--json", type=Path, help="write all times to this file as well")
    given = out.parse_args()
    visits: dict[str, Times] = {
        name: defaultdict(list) for name in (*given.modes.split(","), AGAIN)
    }
    status = 0
    try:
        uvloop.run(measure(given, Console(stderr=True), visits))
    except SystemFailed as error:
        sys.stderr.write(f"error: {error}\n")
        status = 1
    except KeyboardInterrupt:
        status = 1
    show(visits, Console(width=None if sys.stdout.isatty() else 160))
    if given.json:
        given.json.write_text(json.dumps(visits, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
