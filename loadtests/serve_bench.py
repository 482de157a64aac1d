"""kvrelay over HTTP, split, against its peers on the same machine: `--help` has the settings.

All systems run at the same time and one is loaded at a time; before each turn all must be idle.
A block visits every system on every scenario in a random order, ours a second time for the
resolution. What is claimed are medians over blocks of ratios within a block.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from loadtests.serving.client import Request, ask
from loadtests.serving.figures import AGAIN, OURS, Visit
from loadtests.serving.report import Run, as_json, show
from loadtests.serving.scenarios import SCENARIOS, Prompts, Sizes, streams8
from loadtests.serving.systems import (
    UNCHUNKED,
    UNSPLIT,
    Spec,
    System,
    SystemFailed,
    kvrelay_spec,
    llamacpp_spec,
    machine_cpu_s,
    quiet,
    vllm_spec,
)
from rich.console import Console

from kvrelay.services.bench.machine import describe
from kvrelay.shared.checkpoint.fetch import cache_dir, default_model_path
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer
from kvrelay.shared.errors import KvrelayError

WORD = re.compile(rb" [a-z]{3,12}")
WARM_UP = Sizes(waves=1)


@dataclass(frozen=True, slots=True)
class Turns:
    """What is visited, and in which order."""

    scenarios: Sequence[str]
    blocks: int
    seed: int
    again: bool

    def of_block(self, block: int, systems: Sequence[str]) -> list[tuple[str, str]]:
        """(scenario, pass) in the block's order: scenarios as given, systems shuffled in each."""
        order = random.Random(f"{self.seed} {block}")
        passes = [*systems, *([AGAIN] if self.again and OURS in systems else [])]
        return [
            (scenario, name)
            for scenario in self.scenarios
            for name in order.sample(passes, len(passes))
        ]


class Bench:
    """The systems of one run, running."""

    def __init__(
        self, systems: Sequence[System], words: Sequence[int], sizes: Sizes, console: Console
    ) -> None:
        self._systems = {system.spec.name: system for system in systems}
        self._words = words
        self._sizes = sizes
        self._console = console

    async def warm_up(self) -> None:
        """Every shape of work once, for systems that compile or allocate when they meet one."""
        for system in self._systems.values():
            prompts, server = Prompts(self._words, "warm-up"), system.spec.server
            await streams8(server, prompts, WARM_UP)
            await ask(server, Request(prompts.take(self._sizes.long_tokens), 16), time.monotonic())

    async def visit(self, scenario: str, name: str, block: int, seed: int) -> list[Visit]:
        """The rows of one turn. The second pass has other prompts: a cache must not know them."""
        everyone = list(self._systems.values())
        await quiet(everyone)
        system = self._systems[OURS if name == AGAIN else name]
        others = [other for other in everyone if other is not system]
        prompts = Prompts(self._words, f"{seed} {block} {scenario} {name == AGAIN}")
        wall_s, client_s, all_s = time.monotonic(), time.process_time(), machine_cpu_s()
        server_s, idle_s = system.cpu_s(), sum(other.cpu_s() for other in others)
        figures, answers = await SCENARIOS[scenario](system.spec.server, prompts, self._sizes)
        wall_s = time.monotonic() - wall_s
        cost = {
            "server_cpu_share": (system.cpu_s() - server_s) / wall_s,
            "client_cpu_share": (time.process_time() - client_s) / wall_s,
            "idle_cpu_share": (sum(other.cpu_s() for other in others) - idle_s) / wall_s,
        }
        ours = sum(cost.values())
        cost["neighbours_cpu_share"] = (machine_cpu_s() - all_s) / wall_s - ours
        tokens = sum(row["tokens"] for row in figures.values())
        server_ms = 1e3 * cost["server_cpu_share"] * wall_s
        cost["server_cpu_ms_per_token"] = server_ms / tokens if tokens else math.nan
        for error in dict.fromkeys(answer.error for answer in answers if answer.error):
            self._console.print(f"{name}: {error}", markup=False)
        return [Visit(block, name, row, {**each, **cost}) for row, each in figures.items()]


def words_of(model: Path) -> list[int]:
    """Tokens that are one plain word each, so that answers are text like any other."""
    tokenizer = load_tokenizer(model)
    ids = range(tokenizer.vocab_size)
    return [id for id in ids if WORD.fullmatch(tokenizer.token_bytes(id))]


def specs(given: argparse.Namespace) -> list[Spec]:
    """Of the systems asked for. Raises `SystemFailed` for one that is unknown or not installed."""
    source = resolve_model(str(given.model))
    options = ["--model", str(given.model), *shlex.split(given.up)]
    makers: dict[str, Callable[[], Spec]] = {
        "kvrelay": lambda: kvrelay_spec(options),
        "unsplit": lambda: kvrelay_spec([*options, *UNSPLIT], "unsplit"),
        "unchunked": lambda: kvrelay_spec([*options, *UNCHUNKED], "unchunked"),
        "vllm": lambda: vllm_spec(source, given.threads),
        "llamacpp": lambda: llamacpp_spec(source, given.threads),
    }
    names = given.systems.split(",")
    if unknown := [name for name in names if name not in makers]:
        raise SystemFailed(f"systems: {unknown[0]!r} is none of {', '.join(makers)}")
    return [makers[name]() for name in names]


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A number above zero; argparse puts the flag's name before what is said here."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--systems", default="kvrelay", help="comma between; see the README")
    out.add_argument("--scenarios", default=",".join(SCENARIOS), help="default: %(default)s")
    out.add_argument("--blocks", type=positive(int), default=3, help="default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of prompts and orders")
    out.add_argument("--model", type=Path, default=default_model_path(), help="kvrelay's")
    threads = out.add_argument("--threads", type=positive(int), default=2)
    threads.help = "of each peer; default: %(default)s"
    out.add_argument("--up", default="", help="more options of `kvrelay up`, in one string")
    out.add_argument("--no-again", action="store_true", help="visit kvrelay once per block only")
    out.add_argument("--json", type=Path, help="write all figures to this file as well")
    for name, value in asdict(Sizes()).items():
        flag = "--" + name.replace("_", "-")
        kind = positive(type(value))
        out.add_argument(flag, type=kind, default=value, help="default: %(default)s")
    return out


async def measure(given: argparse.Namespace, console: Console, visits: list[Visit]) -> None:
    """Fills `visits` turn by turn: what was measured outlives what goes wrong later."""
    turns = Turns(given.scenarios.split(","), given.blocks, given.seed, not given.no_again)
    if unknown := [name for name in turns.scenarios if name not in SCENARIOS]:
        raise SystemFailed(f"scenarios: {unknown[0]!r} is none of {', '.join(SCENARIOS)}")
    sizes = Sizes(**{name: getattr(given, name) for name in asdict(Sizes())})
    words = words_of(given.model)
    logs = cache_dir() / "serve_bench"
    logs.mkdir(parents=True, exist_ok=True)
    systems = [System(spec, logs / f"{spec.name}.log") for spec in specs(given)]
    with ExitStack() as running:
        for system in systems:
            running.callback(system.stop)
            await system.start()
            console.print(f"{system.spec.name} ready after {system.start_s:.1f} s")
        bench = Bench(systems, words, sizes, console)
        await bench.warm_up()
        for block in range(turns.blocks):
            for scenario, name in turns.of_block(block, [s.spec.name for s in systems]):
                console.print(f"block {block + 1} of {turns.blocks}: {scenario}, {name}")
                visits += await bench.visit(scenario, name, block, turns.seed)


def main() -> int:
    """The exit status: 0, or 1 for a run that was cut short and shows what it has."""
    given = parser().parse_args()
    visits: list[Visit] = []
    status = 0
    try:
        uvloop.run(measure(given, Console(stderr=True), visits))
    except (SystemFailed, KvrelayError) as error:
        sys.stderr.write(f"error: {error}\n")
        status = 1
    except KeyboardInterrupt:
        status = 1
    if visits:
        settings = {name: str(value) for name, value in vars(given).items()}
        run = Run(describe(given.threads), visits, settings)
        show(run, Console())
        if given.json:
            given.json.write_text(as_json(run) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
