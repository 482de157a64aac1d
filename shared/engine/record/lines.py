"""A record as text: JSON, one line a call, the first one says what engine it was.

    {"kvrelay record": 1, "worker": ..., "software": ..., "blocks": ..., "limits": {...}}
    ["Serve", {"owner": ..., "ref": ..., "spec": ..., "handoff": ...}, {}]
    ["plan", 256, {"plan": [1, 20, "5d0c77a1", ...], "out": {"Started": 1}, "crc": "..."}]
    ["complete", [412], {"out": {"TokenOut": 1}, "crc": "..."}]
    ["end", "closed"]

The call in line n + 1 has the number n. A record without its `end` was cut off: the process died.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.policy import POLICIES
from kvrelay.shared.engine.record.entry import (
    Asked,
    Complete,
    Entry,
    FailStep,
    Handle,
    MakePlan,
    Outcome,
    PlanMark,
    outcome_of,
)
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.errors import ConfigError

MAGIC = "kvrelay record"
VERSION = 1
"""Raised when what a line says changes its meaning; a new field of an event does not count."""
MAX_BLOCKS = 1 << 24
_JSON = json.JSONEncoder(separators=(",", ":"))

_EVENTS: dict[str, TypeAdapter[m.Event]] = {
    kind.__name__: TypeAdapter(kind) for kind in m.Event.__args__
}


@dataclass(frozen=True, slots=True)
class Header:
    """What an engine needs to live its life again."""

    limits: EngineLimits
    blocks: int
    worker: str
    """Whose engine it was: for people."""
    software: str
    """kvrelay's version."""


@dataclass(frozen=True, slots=True)
class Line:
    """One recorded call."""

    number: int
    asked: Asked
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class End:
    """The last line: nothing more was recorded."""

    why: str


# ---- writing ----------------------------------------------------------------------------------


def header_line(header: Header) -> bytes:
    """Raises `ValueError` for a policy that has no name."""
    limits = {
        each.name: getattr(header.limits, each.name)
        for each in fields(EngineLimits)
        if each.name not in ("policy", "salt")
    }
    [policy] = [name for name, policy in POLICIES.items() if policy is header.limits.policy]
    limits |= {"salt": header.limits.salt.hex(), "policy": policy}
    return _line(
        {
            MAGIC: VERSION,
            "worker": header.worker,
            "software": header.software,
            "blocks": header.blocks,
            "limits": limits,
        }
    )


def entry_line(entry: Entry) -> bytes:
    outcome = _dump(_outcome_fields(outcome_of(entry)))
    match entry.asked:
        case Handle(event):
            name = type(event).__name__
            return b'["%s",%s,%s]\n' % (name.encode(), _EVENTS[name].dump_json(event), outcome)
        case MakePlan(budget):
            return b'["plan",%d,%s]\n' % (budget, outcome)
        case Complete(drawn):
            return b'["complete",%s,%s]\n' % (_dump(drawn), outcome)
        case FailStep(message):
            return b'["fail_step",%s,%s]\n' % (_dump(message), outcome)


def end_line(why: str) -> bytes:
    return _line(["end", why])


def _outcome_fields(outcome: Outcome) -> dict[str, object]:
    out: dict[str, object] = {}
    if (plan := outcome.plan) is not None:
        out["plan"] = (plan.rows, plan.tokens, plan.legs, plan.spans, plan.blocks)
    if outcome.said:
        out |= {"out": outcome.said, "crc": outcome.content}
    if outcome.raised:
        out["raised"] = outcome.raised
    return out


def _dump(value: object) -> bytes:
    return _JSON.encode(value).encode()


def _line(value: object) -> bytes:
    return _dump(value) + b"\n"


# ---- reading ----------------------------------------------------------------------------------


def read_header(line: bytes) -> Header:
    """Raises `ConfigError` for what is no record of a version that is understood here."""
    data = _json(line)
    if not isinstance(data, dict) or MAGIC not in data:
        raise ConfigError("it is no record of kvrelay")
    if data[MAGIC] != VERSION:
        raise ConfigError(f"it is a record of version {data[MAGIC]!r}; version {VERSION} is read")
    try:
        return Header(
            _limits(dict(data["limits"])),
            _within("blocks", data["blocks"], 1, MAX_BLOCKS),
            str(data["worker"]),
            str(data["software"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"its first line is broken: {_said(error)}") from error


def _limits(data: dict[str, Any]) -> EngineLimits:
    policy, salt = POLICIES[data.pop("policy")], bytes.fromhex(data.pop("salt"))
    numbers = {name: _within(name, value, 0, 2**63) for name, value in data.items()}
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        _within(name, numbers[name], 1, 2**63)
    return EngineLimits(**numbers, policy=policy, salt=salt)


def _within(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, not a number from {least} to {most}")
    return value


def read_line(number: int, line: bytes) -> Line | End:
    """Call `number`. Raises `ConfigError` when it is not what `entry_line` writes."""
    data = _json(line)
    try:
        if data[0] == "end":
            return End(str(data[1]))
        name, given, outcome = data
        return Line(number, _asked(name, given), _outcome(outcome))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name} {where}: {first['msg'][0].lower()}{first['msg'][1:]}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"no recorded call: {_said(error)}") from error


def _asked(name: str, given: Any) -> Asked:
    match name:
        case "plan":
            return MakePlan(_within("the budget", given, 0, 2**63))
        case "complete":
            return Complete(tuple(_drawn(value) for value in given))
        case "fail_step":
            return FailStep(str(given))
        case _ if name in _EVENTS:
            event = _EVENTS[name].validate_python(given, strict=False)
            _check_known(name, given, _EVENTS[name].dump_python(event, mode="json"))
            return Handle(event)
    raise ValueError(f"{name!r} is no call of an engine")


def _drawn(value: object) -> int | str | None:
    if value is None or isinstance(value, str) or type(value) is int:
        return value
    raise ValueError(f"{value!r} is no token")


def _check_known(name: str, given: Any, known: Any) -> None:
    """A field that is not understood here would be lost, and the replay another life."""
    if not isinstance(given, dict):
        return
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{name} has no {key!r} in this version of kvrelay")
        _check_known(f"{name} {key}", value, known[key])


def _outcome(data: dict[str, Any]) -> Outcome:
    plan = PlanMark(*data["plan"]) if "plan" in data else None
    said = {str(kind): int(count) for kind, count in data.get("out", {}).items()}
    return Outcome(plan, said, str(data.get("crc", "")), str(data.get("raised", "")))


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {_said(error)}") from error


def _said(error: Exception) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return text.splitlines()[0] if text else type(error).__name__
