"""Structured logs on stdlib logging: one JSON object a line for machines, one plain line on a tty.

Every line carries part, name and incarnation. A message may add the fields of `FIELDS` through
`extra`; anything else given there is left out, so that no prompt gets into a log by accident. One
that names a leg names its request, and the trace of it, without being told. Secrets in messages and
tracebacks are masked.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TextIO

from kvrelay.shared.config import LogFormat
from kvrelay.shared.errors import ConfigError

Format = LogFormat

FIELDS: Final = ("request", "trace", "leg", "attempt", "peer", "role", "reason", "address")
"""What a message may name besides its text: ids and causes, never content."""

_LEVELS: Final = ("debug", "info", "warning", "error")
_MASKS: Final = (
    # Up to the last @ before a space: a password may itself hold one.
    (re.compile(r"(\w://[^\s/:@]*:)\S*@"), r"\1***@"),
    (re.compile(r"\b(bearer)\s+[^\s'\"]+", re.IGNORECASE), r"\1 ***"),
)


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who logs."""

    part: str
    """`router`, `prefill`, `decode` or the like."""
    name: str
    incarnation: Callable[[], str] = lambda: ""
    """Asked for each line, because a worker that lapsed goes on under another."""
    traceparent: Callable[[str], str] = lambda leg: ""
    """Of a leg that is here; empty if it has none."""


def mask_secrets(text: str) -> str:
    """`text` without passwords of URLs and bearer tokens."""
    for pattern, masked in _MASKS:
        text = pattern.sub(masked, text)
    return text


def configure(
    speaker: Speaker, level: str = "info", form: Format = "auto", stream: TextIO | None = None
) -> None:
    """Send all of this process' logs to `stream` (stderr). For the composition root alone.

    Raises `ConfigError` for an unknown level.
    """
    if level not in _LEVELS:
        raise ConfigError(f"log level {level!r}: must be one of {', '.join(_LEVELS)}")
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    plain = form == "text" or (form == "auto" and out.isatty())
    handler.setFormatter(TextFormatter(speaker) if plain else JsonFormatter(speaker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "part": ..., "message": ...}` on one line."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "part": self._speaker.part,
            "name": self._speaker.name,
            "incarnation": self._speaker.incarnation(),
            "logger": record.name,
            "message": mask_secrets(record.getMessage()),
            **_fields(record, self._speaker),
        }
        if record.exc_info:
            line["error"] = mask_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 WARNING prefill-0 (1f3a): message [request=...]`, then the traceback if any."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        time = _time(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        incarnation = self._speaker.incarnation()[:4]
        who = f"{self._speaker.name} ({incarnation})" if incarnation else self._speaker.name
        # A message holds one line: what others sent cannot look like a line of ours.
        message = mask_secrets(record.getMessage()).replace("\r", "\\r").replace("\n", "\\n")
        fields = " ".join(
            f"{name}={value}" for name, value in _fields(record, self._speaker).items()
        )
        line = f"{time} {record.levelname} {who}: {message}" + (f" [{fields}]" if fields else "")
        if record.exc_info:
            line += "\n" + mask_secrets(self.formatException(record.exc_info))
        return line


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields(record: logging.LogRecord, speaker: Speaker) -> dict[str, object]:
    given = record.__dict__
    found = {name: given[name] for name in FIELDS if given.get(name) not in (None, "")}
    leg = str(found.get("leg", ""))
    if not leg:
        return found
    # `00-<trace>-<span>-01` by the W3C's rules.
    _, _, rest = speaker.traceparent(leg).partition("-")
    if trace := rest.partition("-")[0]:
        found = {"trace": trace, **found}
    return {"request": leg.partition("/")[0], **found}
