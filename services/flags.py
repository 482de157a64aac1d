"""Command-line flags made from the settings themselves: one place for names, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvrelay.shared.config import Settings

Body = Callable[[dict[str, object]], None]
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="TOML file. [dim]KVRELAY_CONFIG[/dim]"),
    ],
)


def with_flags(
    *models: type[Settings],
    without: tuple[str, ...] = (),
    unset: Mapping[str, str] = {},
    arguments: Mapping[str, str] = {},
) -> Callable[[Body], Callable[..., None]]:
    """Give a command one flag per setting of `models`; it receives what was given, by field name.

    `unset`: in the command's own words, what it does without a setting. `arguments`: those of the
    settings that are no flags, by their place, with their help. Values stay text:
    `kvrelay.shared.config.resolve` understands them, whatever they came from.
    """

    def decorate(body: Body) -> Callable[..., None]:
        placed = [_argument(name, text) for name, text in arguments.items()]
        flags = _parameters(models, (*without, *arguments), unset)
        parameters = [*placed, *flags, _CONFIG]

        def command(**flags: Any) -> None:
            given = {name: value for name, value in flags.items() if value not in (None, [], ())}
            body(given)

        command.__doc__ = body.__doc__
        command.__name__ = body.__name__
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        vars(command)["__signature__"] = inspect.Signature(parameters)
        return command

    return decorate


def _argument(name: str, text: str) -> inspect.Parameter:
    argument = typer.Argument(help=text, metavar=name.upper())
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[str, argument]
    )


def _parameters(
    models: tuple[type[Settings], ...], without: tuple[str, ...], unset: Mapping[str, str]
) -> Iterator[inspect.Parameter]:
    seen = set(without)
    for model in models:
        for name, (setting, variable) in model.names().items():
            if name not in seen:
                seen.add(name)
                info = model.model_fields[name]
                known = unset.get(name) or _default(info)
                option = _option(info, setting, variable, model.table, known)
                yield inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
                )


def _default(info: FieldInfo) -> str:
    return "" if info.is_required() or info.default in (None, (), "") else f"{info.default}"


def _option(info: FieldInfo, setting: str, variable: str, panel: str, default: str) -> Any:
    flag = "--" + setting.replace("_", "-")
    known = f" \\[default: {default}]" if default else ""
    text = f"{info.description}{known} [dim]{variable}[/dim]"
    metavar = None if info.annotation is bool else setting.rsplit("_", 1)[-1].upper()
    option = typer.Option(
        flag, help=text, metavar=metavar, show_default=False, rich_help_panel=f"Settings: {panel}"
    )
    if info.annotation is bool:
        return Annotated[bool | None, option]
    if info.annotation == tuple[str, ...]:
        return Annotated[list[str] | None, option]
    return Annotated[str | None, option]
