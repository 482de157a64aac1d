"""Settings: defaults < the file (TOML) < the environment (`KVRELAY_*`) < flags.

`resolve` turns them into one frozen object per service, once, at its start; nothing else reads the
environment. A setting that is unknown or cannot work is a `ConfigError` naming it as it was given,
the value and the limit. The file has top-level keys for every service that knows them, and a table
per service (`[router]`, `[worker]`, `[up]`) that wins over them:

    redis = "redis://10.0.0.5:6379/0"
    [worker]
    dtype = "bfloat16"

Environment names end in no word that a Kubernetes Service called `kvrelay` would inject
(`KVRELAY_PORT=tcp://...`): such names are ignored, and such a value in a setting is explained.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.ports import plain_host

PREFIX = "KVRELAY_"
RESERVED = frozenset({"KVRELAY_CONFIG", "KVRELAY_CACHE_DIR", "KVRELAY_READY_FD"})
"""Variables that are no setting of a service: the file, the cache folder, the supervisor's pipe."""

_SERVICE_LINK = re.compile(
    r"(^|_)(PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|SERVICE_HOST|SERVICE_PORT(_\w+)?)$"
)
_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://", re.IGNORECASE)
_PASSWORD = re.compile(r"(://[^:/@]*:).*@")
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://")


def _split(value: object) -> object:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Any number of names; in a flag or variable they are separated by commas."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Marks a setting that is never shown: not in logs, not in an error about it."""


Secrets = Annotated[tuple[str, ...], BeforeValidator(_split), Field(repr=False), Secret()]
"""Any number of secrets, separated like `Names`."""


def _redis_url(value: str) -> str:
    if not value.startswith(_REDIS_SCHEMES):
        raise ValueError(
            f"must start with {', '.join(_REDIS_SCHEMES[:-1])} or {_REDIS_SCHEMES[-1]}"
        )
    return value


@dataclass(frozen=True, slots=True)
class Named:
    """How a setting is called outside, where its field's name does not fit (no unit, no clash)."""

    setting: str | None = None
    """In the file and, with dashes, as a flag; and in upper case in the environment."""
    env: str | None = None
    """The environment's name after `KVRELAY_`, where it differs from `setting`."""


Host = Annotated[str, AfterValidator(plain_host)]
Port = Annotated[int, Field(ge=0, le=65535)]
LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
ClusterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
RedisUrl = Annotated[
    str, AfterValidator(_redis_url), Field(repr=False), Named(setting="redis", env="REDIS_URL")
]
"""May hold a password: never printed as it is."""


class Settings(BaseModel):
    """Base of each service's configuration: frozen, no unknown fields, each field documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    table: ClassVar[str]
    """The service's table in the file."""

    @classmethod
    def names(cls) -> dict[str, tuple[str, str]]:
        """Of each field: (setting, environment variable)."""
        out = {}
        for name, info in cls.model_fields.items():
            named = next((m for m in info.metadata if isinstance(m, Named)), Named())
            setting = named.setting or name
            out[name] = (setting, PREFIX + (named.env or setting.upper()))
        return out

    def to_env(self) -> dict[str, str]:
        """The variables from which `resolve` makes an equal object (unset fields left out)."""
        out = {}
        for name, (_, variable) in self.names().items():
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = ",".join(value)
            if value is not None and value != "":
                out[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        return out


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything a person can say, before it is understood."""

    flags: Mapping[str, object] = field(default_factory=dict)
    """By field name; None means not given."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    file: Path | None = None
    document: Mapping[str, object] = field(default_factory=dict, repr=False)
    """The parsed file."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """A configuration and, per field, the name under which its value was given."""

    config: S
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """`setting = value (where from)`, passwords masked: fit for logs and terminals."""
        kind = type(self.config)
        return [
            f"{setting} = {_shown(kind, name, getattr(self.config, name))} ({self.origins[name]})"
            for name, (setting, _) in kind.names().items()
        ]


def _shown(kind: type[Settings], name: str, value: object) -> str:
    secret = any(isinstance(mark, Secret) for mark in kind.model_fields[name].metadata)
    return "***" if secret and value else masked(value)


def masked(value: object) -> str:
    """`value` as text, with the password of any URL in it replaced by stars."""
    return _PASSWORD.sub(r"\1***@", str(value))


def read_sources(flags: Mapping[str, object], env: Mapping[str, str]) -> Sources:
    """Read the file named by the flag `config` or by `KVRELAY_CONFIG`. Raises `ConfigError`."""
    flags = {name: value for name, value in flags.items() if value is not None}
    named = flags.pop("config", None) or env.get("KVRELAY_CONFIG")
    if not named:
        return Sources(flags, env)
    path = Path(str(named))
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from error
    return Sources(flags, env, path, document)


def check_known(sources: Sources, models: Iterable[type[Settings]]) -> None:
    """Raise `ConfigError` for a file key or `KVRELAY_*` variable that no service has."""
    models = tuple(models)
    variables = RESERVED | {variable for m in models for _, variable in m.names().values()}
    for variable in sorted(sources.env):
        if variable.startswith(PREFIX) and variable not in variables:
            if _SERVICE_LINK.search(variable) and _is_link(sources.env[variable], variable):
                continue
            raise ConfigError(f"{variable} is not a setting{_suggest(variable, variables)}")
    tables = {m.table: {setting for setting, _ in m.names().values()} for m in models}
    common = set().union(*tables.values())
    for key, value in sources.document.items():
        keys: Iterable[str] = value if isinstance(value, dict) else ()
        known = tables.get(key, set()) if isinstance(value, dict) else common
        if isinstance(value, dict) and key not in tables:
            raise ConfigError(f"{sources.file}: [{key}] is not a table{_suggest(key, tables)}")
        for name in keys if isinstance(value, dict) else (key,):
            if name not in known:
                where = f"[{key}] {name}" if isinstance(value, dict) else name
                raise ConfigError(
                    f"{sources.file}: {where} is not a setting{_suggest(name, known)}"
                )


def _is_link(value: str, variable: str) -> bool:
    """Whether Kubernetes made this variable; a plain `KVRELAY_PORT=80` is a person's mistake."""
    return bool(_LINK_VALUE.match(value)) or "_SERVICE_" in variable or "_PORT_" in variable


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def resolve(model: type[S], sources: Sources, defaults: Mapping[str, object] = {}) -> Resolved[S]:
    """The settings of one service. `defaults` stand in for the model's own.

    Raises `ConfigError` with the setting as it was given, the value and the limit.
    """
    values: dict[str, object] = dict(defaults)
    origins = dict.fromkeys(model.model_fields, "default")
    table = sources.document.get(model.table, {})
    for name, (setting, variable) in model.names().items():
        top = sources.document.get(setting)
        layers = (
            # A table may be called as another service's setting is.
            (None if isinstance(top, dict) else top, f"{setting} in {sources.file}"),
            (
                table.get(setting) if isinstance(table, dict) else None,
                f"[{model.table}] {setting} in {sources.file}",
            ),
            (sources.env.get(variable) or None, variable),
            (sources.flags.get(name), "--" + setting.replace("_", "-")),
        )
        for value, origin in layers:
            if value is not None:
                values[name], origins[name] = value, origin
    try:
        return Resolved(model.model_validate(values), origins)
    except ValidationError as error:
        raise _config_error(model, error, origins) from None  # the cause would show a password


def _config_error(
    model: type[Settings], error: ValidationError, origins: Mapping[str, str]
) -> ConfigError:
    """The first of pydantic's complaints in our words."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return ConfigError(message)
    name = str(first["loc"][0])
    setting, variable = model.names()[name]
    if first["type"] == "missing":
        flag = "--" + setting.replace("_", "-")
        return ConfigError(f"{flag} (or {variable}, or {setting} in the file) is required")
    if first["type"] == "byte_size":
        message = "Not a number of bytes, like 536870912 or 512MiB"
    said = origins[name] if origins[name] != "default" else setting
    value = _shown(model, name, first["input"])
    if _LINK_VALUE.match(value) and origins[name] == variable:
        return ConfigError(
            f"{said} is {value!r}, which a Kubernetes Service link has set: give the pod "
            f"enableServiceLinks: false or the Service another name"
        )
    return ConfigError(f"{said} is {value!r}: {message[0].lower()}{message[1:]}")
