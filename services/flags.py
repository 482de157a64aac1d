"""Command-line flags made from the settings themselves: one place for names, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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
    *models: type[Settings], without: tuple[str, ...] = ()
) -> Callable[[Body], Callable[..., None]]:
    """Give a command one flag per setting of `models`; it receives what was given, by field name.

    Values stay text: `kvrelay.shared.config.resolve` understands them, whatever they came from.
    """

    def decorate(body: Body) -> Callable[..., None]:
        parameters = [*_parameters(models, without), _CONFIG]

        def command(**flags: Any) -> None:
            given = {name: value for name, value in flags.items() if value not in (None, [], ())}
            body(given)

        command.__doc__ = body.__doc__
        command.__name__ = body.__name__
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        vars(command)["__signature__"] = inspect.Signature(parameters)
        return command

    return decorate


def _parameters(
    models: tuple[type[Settings], ...], without: tuple[str, ...]
) -> Iterator[inspect.Parameter]:
    seen = set(without)
    for model in models:
        for name, (setting, variable) in model.names().items():
            if name not in seen:
                seen.add(name)
                option = _option(model.model_fields[name], setting, variable, model.table)
                yield inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
                )


def _option(info: FieldInfo, setting: str, variable: str, panel: str) -> Any:
    flag, default = "--" + setting.replace("_", "-"), info.default
    known = "" if info.is_required() or default in (None, (), "") else f" [default: {default}]"
    text = f"{info.description}{known.replace('[', chr(92) + '[')} [dim]{variable}[/dim]"
    metavar = None if info.annotation is bool else setting.rsplit("_", 1)[-1].upper()
    option = typer.Option(
        flag, help=text, metavar=metavar, show_default=False, rich_help_panel=f"Settings: {panel}"
    )
    if info.annotation is bool:
        return Annotated[bool | None, option]
    if info.annotation == tuple[str, ...]:
        return Annotated[list[str] | None, option]
    return Annotated[str | None, option]
