"""The commands for those who run a cluster: let a worker go, look, replay, hurt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvrelay.services.audit.config import AuditConfig
from kvrelay.services.doctor.config import DoctorConfig
from kvrelay.services.drain_config import DrainConfig
from kvrelay.services.flags import with_flags
from kvrelay.services.local import of_this_machine
from kvrelay.services.sources import read
from kvrelay.services.top_config import TopConfig
from kvrelay.services.trace_config import TraceConfig
from kvrelay.shared import config as settings

operations = typer.Typer()


@operations.command("drain")
@with_flags(DrainConfig, arguments={"worker": "The worker's name, or how its incarnation begins."})
def drain(flags: dict[str, object]) -> None:
    """Let a worker go without anybody noticing, and wait until it has gone.

    It takes no new work. What it runs may end in the first half of the time; then it is moved to
    other workers and continues there with the same tokens. SIGTERM to the worker does the same.
    Exit code 1: requests were still with it when its time was up, or it could not be asked.
    Under `kvrelay up` it is started again at once: so a part of a running cluster is renewed.

    Examples:

      kvrelay drain decode-0

      kvrelay drain decode-1 --within-s 300 --redis redis://10.0.0.5:6379/0
    """
    from kvrelay.services.drain import run

    config = of_this_machine(settings.resolve(DrainConfig, read(flags)))
    raise typer.Exit(run(config, Console(width=None if sys.stdout.isatty() else 200)))


@operations.command("top")
@with_flags(TopConfig)
def top(flags: dict[str, object]) -> None:
    """Show what a router serves, as its /dashboard does: workers, pools, requests, percentiles.

    It is drawn anew each second until Ctrl-C; where there is no terminal, once.

    Examples:

      kvrelay top

      kvrelay top --router http://10.0.0.9:8000 --once

      kvrelay top --json | jq '.totals.first_token'
    """
    from kvrelay.services.top import run

    config = settings.resolve(TopConfig, read(flags)).config
    raise typer.Exit(run(config, Console(width=None if sys.stdout.isatty() else 200)))


@operations.command("trace")
@with_flags(TraceConfig, arguments={"request": "The request's id, or that of its answer."})
def trace(flags: dict[str, object]) -> None:
    """Show where one request's time went, on all processes, and why its first token was not sooner.

    A router keeps the last thousand that ended, and those in flight.

    Examples:

      kvrelay trace chatcmpl-f2ca1bb6c7e907d06dafe4687e579fce

      kvrelay trace f2ca1bb6c7e907d06dafe4687e579fce --router http://10.0.0.9:8000 --json
    """
    from kvrelay.services.trace import run

    config = settings.resolve(TraceConfig, read(flags)).config
    raise typer.Exit(run(config, Console(width=None if sys.stdout.isatty() else 200)))


@operations.command("replay")
def replay(
    file: Annotated[Path, typer.Argument(help="A record that a worker wrote with --record DIR.")],
    until: Annotated[
        int | None, typer.Option(min=1, help="Stop before this call, and show all legs.")
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="Wait for Enter after each step.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare only, and show no steps.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each step, and one for the result.")
    ] = False,
    checks: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Check the pool after each call, or at the end."),
    ] = True,
) -> None:
    """Live a recorded engine's life again, without a model, and show its steps.

    The pool is checked after each call. The first call that goes another way than recorded ends it
    with exit code 1. Steps are shown by leg and number of tokens, but the file itself holds the
    token ids of all prompts and answers: treat it like what people wrote.

    Examples:

      kvrelay replay records/20260102-101500-decode-0-3f2a9c1b.jsonl

      kvrelay replay records/20260102-101500-decode-0-3f2a9c1b.jsonl --verify --until 1290
    """
    from kvrelay.services.replay import ReplayOptions, run

    console = Console(width=None if sys.stdout.isatty() else 200)
    raise typer.Exit(run(file, ReplayOptions(until, step, verify, as_json, checks), console))


@operations.command("audit")
@with_flags(AuditConfig)
def audit(flags: dict[str, object]) -> None:
    """List whatever in a running cluster has no live owner: blocks, reservations, records, leases.

    Workers, routers and Redis are asked at the same time, up to five times, a second apart: what is
    listed was so each time. It changes nothing, and a loaded cluster serves on.

    Exit code: 0 when everything has an owner, 1 when something has none, 2 when somebody did not
    answer, who is then named.

    Examples:

      kvrelay audit

      kvrelay audit --redis redis://10.0.0.5:6379/0 --router http://10.0.0.9:8000

      kvrelay audit --json | jq '.findings[] | select(.kind == "blocks")'
    """
    config = of_this_machine(settings.resolve(AuditConfig, read(flags)))
    from kvrelay.services.audit.app import run

    raise typer.Exit(run(config, Console(width=None if sys.stdout.isatty() else 200)))


@operations.command("doctor")
@with_flags(DoctorConfig)
def doctor(flags: dict[str, object]) -> None:
    """Say what this machine has, how a cluster is, what is wrong and what to do about it.

    Of the machine: versions, the kernels that would compute and why, the transport that would carry
    blocks, memory and limits. Of the cluster that its Redis knows: who is registered, which workers
    differ from the others and in what, and of each prefill-decode pair what it relays by, how fast,
    and how far its clocks are apart. That is measured with a few MB over the pair's own lane, when
    no chunk waits, into memory that holds no blocks: do it while the cluster serves.

    Exit code 0: nothing is wrong. 1: something is. 2: the Redis that was given does not answer.
    Without --redis a cluster on this machine is looked at if there is one.

    Examples:

      kvrelay doctor

      kvrelay doctor --redis redis://10.0.0.5:6379/0 --json
    """
    resolved = settings.resolve(DoctorConfig, read(flags))
    config = of_this_machine(resolved)
    from kvrelay.services.doctor.run import run

    console = Console(width=None if sys.stdout.isatty() else 200)
    asked_for = resolved.origins["redis_url"] != "default" or config is not resolved.config
    raise typer.Exit(run(config, asked_for=asked_for, console=console))


@operations.command("chaos")
def chaos(  # noqa: PLR0913 - one per flag
    plan: Annotated[Path, typer.Argument(help="Faults and what is done to processes (YAML).")],
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 300,
    clients: Annotated[int, typer.Option(min=1, max=1000, help="Clients at a time.")] = 8,
    over: Annotated[
        float, typer.Option(min=0, help="Spread the requests over so many seconds.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the plan's own.")] = None,
    model: Annotated[str | None, typer.Option(help="As of `kvrelay up`.")] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A random model of two layers, made here, small pools.")
    ] = False,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Hurt a cluster of this machine's own by a plan, under load, and report what held.

    It starts a store, workers and a router, asks seeded questions of which some clients do not wait
    for the end, injects the plan's faults, and compares every token with those of a server that
    nobody disturbs. Exit code 1 when a request ended twice or never, a token was wrong, a block
    leaked, a gauge is off its baseline, or too few answers were whole.

    Settings of workers and router come from the environment and the file.

    Examples:

      kvrelay chaos loadtests/chaos/kills.yaml --tiny

      kvrelay chaos loadtests/chaos/soak.yaml --requests 10000 --seed 7 --json
    """
    from kvrelay.services.chaos.deploy import chaotic
    from kvrelay.services.chaos.load import Shape
    from kvrelay.services.chaos.run import ChaosOptions, new_folder, run
    from kvrelay.shared.chaos.plan import load_plan

    found = load_plan(plan)
    flags = {"model": model, "prefill": str(prefill), "decode": str(decode)}
    folder = new_folder()
    deployment = chaotic(plan, read(flags), folder / "tiny" if tiny else None)
    shape = Shape(requests, clients, over)
    options = ChaosOptions(shape, found.seed if seed is None else seed, as_json)
    console = Console(width=None if sys.stdout.isatty() else 200)
    raise typer.Exit(run(deployment, found, options, folder, console))
