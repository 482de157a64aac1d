"""The `kvrelay` command. A service is imported when its command runs, so that help is instant."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console

from kvrelay import __version__
from kvrelay.services.bench.config import WORKER_FIELDS, BenchConfig
from kvrelay.services.deployment import Deployment, UpConfig
from kvrelay.services.flags import with_flags
from kvrelay.services.operations import operations
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.sources import read
from kvrelay.shared import config as settings
from kvrelay.shared.checkpoint import fetch
from kvrelay.shared.errors import ConfigError, KvrelayError, ModelError
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

_NOT_FOR_BENCH = tuple(set(WorkerConfig.model_fields) - set(WORKER_FIELDS))
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
S = TypeVar("S", RouterConfig, WorkerConfig)

app = typer.Typer(
    name="kvrelay",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # its tracebacks print local variables: passwords, prompts
    add_completion=False,
    help="""Serve a language model with the prompt and the answer on different workers.

    On one machine, everything at once: [bold]kvrelay up[/bold]. Then point any OpenAI client at
    http://127.0.0.1:8000/v1.

    On several: a Redis, then [bold]kvrelay prefill[/bold] and [bold]kvrelay decode[/bold] on the
    workers and [bold]kvrelay router[/bold] in front, all with the same --redis and --model.

    Every setting can stand in a file (--config), in the environment or in a flag; the later wins.
    """,
)
model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(model_app, name="model")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements on this machine.")
app.add_typer(bench_app, name="bench")


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def kvrelay(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """All commands; the help above is the application's."""


@app.command("up")
@with_flags(
    UpConfig,
    RouterConfig,
    WorkerConfig,
    without=("role", "name", "metrics_port"),
    unset={"redis_url": "a Valkey of its own"},
)
def up(flags: dict[str, object]) -> None:
    """Start all parts on this machine and keep them running until Ctrl-C.

    Without --model it serves SmolLM2-135M-Instruct, without --redis it starts a Valkey of its own.

    Examples:

      kvrelay up

      kvrelay up --model ~/models/Qwen2.5-0.5B-Instruct --prefill 2 --port 8123

      kvrelay up --unsplit --dtype float32
    """
    # Into a file, lines stay whole: nobody wraps them there.
    console = Console(width=None if sys.stdout.isatty() else 200)
    sources = read(flags)
    router = settings.resolve(RouterConfig, sources, {"model": str(fetch.default_model_path())})
    if router.origins["model"] == "default":
        fetch_model(console)
    check_model(router.config.model)
    own = {name: value for name, value in flags.items() if name not in ("host", "port")}
    worker = settings.resolve(
        WorkerConfig, replace(sources, flags=own), {"model": router.config.model}
    )
    check_worker(worker.config)
    deployment = Deployment(
        settings.resolve(UpConfig, sources).config,
        router.config,
        worker.config,
        external_redis=router.origins["redis_url"] != "default",
    )
    from kvrelay.services.up import run

    raise typer.Exit(run(deployment, console))


@app.command("router")
@with_flags(RouterConfig)
def router(flags: dict[str, object]) -> None:
    """Serve the OpenAI API and send each request to the workers registered in Redis.

    Example:

      kvrelay router --redis redis://10.0.0.5:6379/0 --model ~/models/Qwen2.5-0.5B-Instruct
    """
    config = resolved(RouterConfig, flags)
    from kvrelay.services.router.app import run

    raise typer.Exit(run(config))


@app.command("prefill")
@with_flags(WorkerConfig, without=("role",))
def prefill(flags: dict[str, object]) -> None:
    """Run a worker that computes prompts and relays their KV blocks to decode workers.

    Example:

      kvrelay prefill --redis redis://10.0.0.5:6379/0 --host 0.0.0.0 --advertise-host 10.0.0.7
    """
    config = resolved(WorkerConfig, {**flags, "role": Role.PREFILL})
    from kvrelay.services.prefill.app import run

    raise typer.Exit(run(config))


@app.command("decode")
@with_flags(WorkerConfig)
def decode(flags: dict[str, object]) -> None:
    """Run a worker that continues relayed prompts, or with --role both serves alone.

    Examples:

      kvrelay decode --redis redis://10.0.0.5:6379/0 --kv-cache-memory 2GiB

      kvrelay decode --role both
    """
    config = resolved(WorkerConfig, flags, role=Role.DECODE)
    from kvrelay.services.decode.app import run

    raise typer.Exit(run(config))


app.registered_commands += operations.registered_commands


@app.command("version")
def version() -> None:
    """Print the version."""
    from kvrelay import __version__

    typer.echo(__version__)


@model_app.command("fetch")
def model_fetch() -> None:
    """Download the default model (SmolLM2-135M-Instruct, 93 MB) into the cache; print its path."""
    typer.echo(fetch_model(Console(stderr=True)))


@bench_app.callback()
def bench() -> None:
    """Keeps `engine` a command of its own while it is the only one."""


@bench_app.command("engine")
@with_flags(BenchConfig, WorkerConfig, without=_NOT_FOR_BENCH)
def bench_engine(flags: dict[str, object]) -> None:
    """Measure prefill and decode of the engine without HTTP, alone or in turns with other engines.

    Examples:

      kvrelay bench engine

      kvrelay bench engine --peer vllm --peer llamacpp --json --plot engine.png
    """
    sources = read(flags)
    worker = settings.resolve(WorkerConfig, sources, {"model": str(fetch.default_model_path())})
    check_model(worker.config.model)
    from kvrelay.services.bench.engine import run

    run(settings.resolve(BenchConfig, sources).config, worker.config, Console())


def resolved(model: type[S], flags: Mapping[str, object], **defaults: object) -> S:
    """The service's configuration, printed as it will be used."""
    model_path = str(fetch.default_model_path())
    outcome = settings.resolve(model, read(flags), {"model": model_path, **defaults})
    for line in outcome.lines():
        typer.echo(f"config: {line}", err=True)
    check_model(outcome.config.model)
    return outcome.config


def check_model(model: str) -> None:
    """Raise `ModelError` for what is neither here nor the form of a hub id."""
    if Path(model).exists() or _HUB_ID.match(model):
        return
    hint = "; `kvrelay model fetch` gets it" if model == str(fetch.default_model_path()) else ""
    raise ModelError(f"model: {model} does not exist{hint}")


def check_worker(config: WorkerConfig) -> None:
    """Raise now, in the person's words, what every worker would say after its start.

    A hub id is fetched here, once for all of them.
    """
    from kvrelay.shared.checkpoint.config import read_config
    from kvrelay.shared.checkpoint.source import resolve_model
    from kvrelay.shared.worker.affinity import check_cpus, parse_cpus
    from kvrelay.shared.worker.capacity import worker_capacity

    check_cpus(parse_cpus(config.cpu_affinity))
    try:
        model = read_config(resolve_model(config.model))
    except ModelError as error:
        raise ModelError(f"model: {error}") from error
    worker_capacity(config, model)


def fetch_model(console: Console) -> Path:
    """The default model, downloaded if it is not here yet."""
    from kvrelay.services.console import byte_progress

    with byte_progress(console) as progress:
        return fetch.fetch_default_model(progress)


def main() -> None:
    """An error with a name becomes one line; 2 for usage and settings, else 1."""
    try:
        app()
    except KvrelayError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def process() -> NoReturn:
    """Entry point: `main` is all that this process is for, and has closed what it opened.

    It ends at once, for gRPC's teardown at the end of the interpreter was seen to spin for ever.
    """
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    process()
