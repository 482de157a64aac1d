"""`kvrelay chaos`: a cluster, a plan, seeded load, and a report of what held."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvrelay.services.chaos.cluster import ChaosCluster
from kvrelay.services.chaos.hands import Hands
from kvrelay.services.chaos.load import QUESTIONS, Load, Shape, questions, right_answers
from kvrelay.services.chaos.report import Outcome, show
from kvrelay.services.chaos.watch import Faults, at_rest, sizes, until_all_seen
from kvrelay.services.deployment import Deployment
from kvrelay.shared.chaos.plan import ChaosPlan
from kvrelay.shared.errors import ConfigError

LOOK_S = 0.5
WARM_SHARE = 0.2
"""After this part of the load the sizes of processes are the ones that may not grow."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    shape: Shape
    seed: int
    as_json: bool


def run(
    deployment: Deployment,
    plan: ChaosPlan,
    options: ChaosOptions,
    folder: Path,
    console: Console,
) -> int:
    """0 when all that must hold held, else 1. Raises `ConfigError` for a plan that cannot be."""
    outcome = asyncio.run(live(deployment, plan, options, folder))
    show(outcome, console, as_json=options.as_json)
    if outcome.complaints():
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def new_folder() -> Path:
    """For the logs of a run; it stays where something did not hold."""
    return Path(tempfile.mkdtemp(prefix="kvrelay-chaos-"))


async def live(
    deployment: Deployment, plan: ChaosPlan, options: ChaosOptions, folder: Path
) -> Outcome:
    cluster = ChaosCluster(deployment, folder)
    check_parts(plan, cluster)
    with progress(options.shape.requests) as tick:
        try:
            await cluster.start()
            await until_all_seen(cluster.reference_url, 1)
            asked = questions(cluster.model, options.seed, min(QUESTIONS, options.shape.requests))
            right = await right_answers(cluster.reference_url, asked)
            await until_all_seen(cluster.url, len(cluster.workers))
            await cluster.keep()
            return await _loaded(cluster, plan, options, Load(
                cluster, asked, right, options.seed, plan.expect.cancels
            ), tick)  # fmt: skip
        finally:
            await cluster.stop()


def check_parts(plan: ChaosPlan, cluster: ChaosCluster) -> None:
    """Raises `ConfigError` for a part that is not there."""
    names = sorted({*(kept.name for kept in cluster.parts), "worker", "prefill", "decode"})
    for number, action in enumerate(plan.processes):
        if not cluster.matching(action.part):
            raise ConfigError(
                f"chaos: processes.{number}.part is {action.part!r}: "
                f"must be one of {', '.join(names)}"
            )


async def _loaded(
    cluster: ChaosCluster,
    plan: ChaosPlan,
    options: ChaosOptions,
    load: Load,
    tick: Callable[[int], None],
) -> Outcome:
    faults, warm = Faults(), {"sizes": sizes(cluster.parts)}

    def on_done(done: int) -> None:
        if done == int(options.shape.requests * WARM_SHARE):
            warm["sizes"] = sizes(cluster.parts)
        tick(done)

    hands = Hands(cluster, plan, options.seed, lambda: load.tally.done / options.shape.requests)
    looking = asyncio.create_task(_look(faults, cluster))
    hurting = asyncio.create_task(hands.run())
    begun_s = time.monotonic()
    try:
        await load.run(options.shape, on_done)
        took_s = time.monotonic() - begun_s
    finally:
        for task in (looking, hurting):
            task.cancel()
        results = await asyncio.gather(looking, hurting, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    cluster.thaw()
    await cluster.all_up()
    await until_all_seen(cluster.url, len(cluster.workers))
    rest = await at_rest(cluster)
    await faults.look(cluster)
    return Outcome(
        requests=options.shape.requests,
        took_s=took_s,
        tally=load.tally,
        rest=rest,
        actions=hands.done,
        noticed_s=hands.noticed_s,
        faults=faults.total(),
        before=warm["sizes"],
        after=sizes(cluster.parts),
        least_full=plan.expect.full_answers,
        retries=plan.expect.retries,
        log_folder=os.fspath(cluster.folder),
    )


async def _look(faults: Faults, cluster: ChaosCluster) -> None:
    while True:
        await faults.look(cluster)
        await asyncio.sleep(LOOK_S)  # the pace of looking


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield lambda done: None
        return
    with Progress(console=errors, transient=True) as bars:
        task = bars.add_task("chaos", total=total)
        yield lambda done: bars.update(task, completed=done)
