"""Logs: one line each, with who speaks, without secrets or content."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.telemetry.log import Speaker, configure, mask_secrets


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_machine_reads_one_json_object_a_line() -> None:
    out = io.StringIO()
    incarnation = ["a1"]
    configure(Speaker("decode", "decode-0", lambda: incarnation[0]), stream=out)
    log = logging.getLogger("kvrelay.x")
    log.info("hello %s\nworld", "big", extra={"request": "r1", "attempt": 2})
    incarnation[0] = "b2"
    log.warning("later")
    log.debug("unseen")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "part": "decode",
        "name": "decode-0",
        "incarnation": "a1",
        "logger": "kvrelay.x",
        "message": "hello big\nworld",
        "request": "r1",
        "attempt": 2,
    }
    assert (second["incarnation"], second["message"]) == ("b2", "later")


def test_a_person_reads_one_plain_line() -> None:
    out = io.StringIO()
    speaker = Speaker("prefill", "prefill-0", lambda: "1f3ab2")
    configure(speaker, form="text", stream=out)
    logging.getLogger("kvrelay.x").warning("lost\nERROR forged", extra={"peer": "decode-1"})
    line = out.getvalue()
    assert line[13:] == "WARNING prefill-0 (1f3a): lost\\nERROR forged [peer=decode-1]\n"


def test_what_is_not_a_known_field_is_left_out() -> None:
    out = io.StringIO()
    configure(Speaker("router", "router"), stream=out)
    logging.getLogger("kvrelay.x").info("done", extra={"prompt": "my secret", "leg": "r/0"})
    assert "my secret" not in out.getvalue()
    assert json.loads(out.getvalue())["leg"] == "r/0"


def test_a_line_about_a_leg_names_its_request_and_the_trace() -> None:
    out = io.StringIO()
    traces = {"r1/0": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    configure(Speaker("decode", "d", traceparent=lambda leg: traces.get(leg, "")), stream=out)
    for leg in ("r1/0", "r2/1"):
        logging.getLogger("kvrelay.x").warning("late", extra={"leg": leg, "reason": ""})
    traced, untraced = map(json.loads, out.getvalue().splitlines())
    assert (traced["request"], traced["trace"], traced["leg"]) == (
        *("r1", "4bf92f3577b34da6a3ce929d0e0e4736"),
        "r1/0",
    )
    assert untraced["request"] == "r2"
    assert "trace" not in untraced and "reason" not in untraced


@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_masked_in_messages_and_tracebacks(form: str) -> None:
    out = io.StringIO()
    configure(Speaker("router", "router"), form=form, stream=out)  # type: ignore[arg-type]
    try:
        raise OSError("cannot reach redis://u:hunter2@h:1/0")
    except OSError:
        logging.getLogger("kvrelay.x").exception("using %s", "redis://:hunter2@h/0")
    assert "hunter2" not in out.getvalue()
    assert out.getvalue().count("***@h") == 3, "message, source line and error"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:pw@h:6379/0 is away", "redis://:***@h:6379/0 is away"),
        ("rediss://user:p@ss:w/rd@h and x@y", "rediss://user:***@h and x@y"),
        ("Authorization: Bearer sk-123, then", "Authorization: Bearer *** then"),
        ("no secret: a@b.c", "no secret: a@b.c"),
    ],
)
def test_masking(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^log level 'loud': must be one of debug, info, "):
        configure(Speaker("router", "router"), level="loud")
