"""A chaos plan as data: which faults happen at which named steps, and what is done to processes.

    seed: 7
    rules:                      # inside the parts, at steps of the protocol
      - {step: chunk.body, fault: flip, rate: 0.01}
      - {step: token, fault: delay, nth: 50, delay_s: 0.2, at: decode}
      - {step: chunk.header, fault: kill, nth: 40, limit: 1, at: prefill-0}
    processes:                  # from outside, by `kvrelay chaos`
      - {action: kill, part: worker, every_s: 5}
      - {action: stop, part: redis, at_s: [10, 30], for_s: 3}

A plan with the same seed makes the same decisions again (`kvrelay.shared.chaos.decide`).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.types import Role


class Step(StrEnum):
    """Where a rule applies: the two messages of a chunk, commands to workers, events from them."""

    CHUNK_HEADER = "chunk.header"
    CHUNK_BODY = "chunk.body"
    SERVE = "serve"
    RESERVE = "reserve"
    ROOM = "room"
    """To prefill."""
    PUBLISHED = "published"
    """To prefill."""
    CANCEL = "cancel"
    NEED_ROOM = "need_room"
    ROOM_GIVEN = "room_given"
    """From decode."""
    STARTED = "started"
    TOKEN = "token"
    PUBLISHED_OUT = "published_out"
    """From decode."""
    ENDED = "ended"
    DRAINING = "draining"
    MET = "met"


CHUNK_STEPS: Final = frozenset({Step.CHUNK_HEADER, Step.CHUNK_BODY})


class Fault(StrEnum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """It is put aside until the next message has gone before it, or `delay_s` are over."""
    TRUNCATE = "truncate"
    FLIP = "flip"
    KILL = "kill"
    """The process kills itself, just before the step."""
    TERM = "term"
    STOP = "stop"
    """The process freezes for `delay_s`."""


PROCESS_FAULTS: Final = frozenset({Fault.KILL, Fault.TERM, Fault.STOP})
DAMAGE: Final = frozenset({Fault.TRUNCATE, Fault.FLIP})


class Action(StrEnum):
    KILL = "kill"
    TERM = "term"
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `for_s`."""
    RESTART = "restart"
    """SIGTERM, and a new start when it has ended."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Rule(_Entry):
    """One fault at one step of the protocol."""

    step: Step
    fault: Fault
    rate: Annotated[float | None, Field(gt=0, le=1)] = None
    """How often, of all messages of this step."""
    nth: Annotated[int | None, Field(ge=1)] = None
    """Every so many messages of this step, instead of by `rate`."""
    limit: Annotated[int | None, Field(ge=1)] = None
    """Most times in the life of one process."""
    at: str = ""
    """Only in this role (prefill, decode, both, router) or part (decode-0). Empty: everywhere."""
    delay_s: Annotated[float, Field(gt=0, le=60)] = 0.05
    """Of a delay at most; of the others that wait, exactly."""

    @model_validator(mode="after")
    def _sensible(self) -> Rule:
        if (self.rate is None) == (self.nth is None):
            raise ValueError("exactly one of rate and nth is needed")
        if self.fault in DAMAGE and self.step not in CHUNK_STEPS:
            raise ValueError(
                f"{self.fault} is for {' and '.join(sorted(CHUNK_STEPS))}, not {self.step}"
            )
        return self


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class ProcessAction(_Entry):
    """Something done to a part from outside."""

    action: Annotated[tuple[Action, ...], BeforeValidator(_listed), Field(min_length=1)]
    """One, or several of which one is drawn each time."""
    part: Annotated[str, Field(min_length=1)]
    """A part (decode-0, router, redis), or any of a kind: prefill, decode, worker."""
    at_s: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """When, in seconds of the load."""
    at_done: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Or when this part of all requests is done."""
    every_s: Annotated[float | None, Field(gt=0)] = None
    """Or how often, in seconds."""
    every_restarts: Annotated[float | None, Field(gt=0)] = None
    """Or how often, in times that the start of a worker takes."""
    for_s: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How long a stopped process stands still, in seconds."""
    down_s: Annotated[float, Field(ge=0, le=600)] = 0.0
    """How long an ended process stays away before it is started again, in seconds."""
    limit: Annotated[int | None, Field(ge=1)] = None
    last: bool = False
    """May take the last worker of its role, too; otherwise it waits until there is another."""

    @model_validator(mode="after")
    def _sensible(self) -> ProcessAction:
        whens = (self.at_s, self.at_done, self.every_s, self.every_restarts)
        if sum(bool(when) for when in whens) != 1:
            raise ValueError("exactly one of at_s, at_done, every_s and every_restarts is needed")
        return self


class Expectations(_Entry):
    """What the plan expects of the system that lives through it."""

    full_answers: Annotated[float, Field(ge=0, le=1)] = 0.995
    """Least part of the clients that stayed who get their whole answer."""
    cancels: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Part of the clients who leave in the middle."""
    retries: bool = True
    """Whether attempts may be given up: where nothing is hurt, whoever is missed was well."""


class ChaosPlan(_Entry):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rules: tuple[Rule, ...] = ()
    processes: tuple[ProcessAction, ...] = ()
    expect: Expectations = Expectations()

    def rules_at(self, part: str, role: Role | str) -> list[tuple[int, Rule]]:
        """Those that a part must keep, each with its number in the plan."""
        return [
            (number, rule)
            for number, rule in enumerate(self.rules)
            if rule.at in ("", part, str(role))
        ]


def parse_plan(text: str, where: str) -> ChaosPlan:
    """Raises `ConfigError` naming the field, the limit and the value."""
    import yaml  # nobody else needs it

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"chaos: {where} is not valid YAML: {problem}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"chaos: {where} must hold a mapping, got {type(document).__name__}")
    try:
        return ChaosPlan.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"chaos: {where}: {field} is {first['input']!r}: {message[0].lower()}{message[1:]}"
        ) from None


def load_plan(path: Path) -> ChaosPlan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"chaos: cannot read {path}: {reason}") from None
    return parse_plan(text, str(path))
