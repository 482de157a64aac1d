"""Server-sent events, as OpenAI frames them: one `data:` line and a blank line for each."""

from __future__ import annotations

import json

HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)

DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    """`body` is one line: JSON without line breaks between its parts."""
    return b"data: " + body + b"\n\n"


class Envelope:
    """The part of a stream's chunks that never changes, serialised once for each request.

    A chunk is `{"id":…,"object":…,"created":…,"model":…,"choices":[…]}`, with `"usage":null` at its
    end when usage was asked for. Strings are in ASCII: some clients split lines at U+2028 and the
    like, which JSON does not escape by itself.
    """

    def __init__(self, id: str, kind: str, created_s: int, model: str, include_usage: bool) -> None:
        common = {"id": id, "object": kind, "created": created_s, "model": model}
        self._head = "data: " + json.dumps(common)[:-1] + ', "choices": ['
        self._tail = '], "usage": null' if include_usage else "]"

    def chunk(self, choice: str, usage: str = "", extra: str = "") -> bytes:
        """`choice` is the JSON of one choice, `usage` that of an object, if each chunk has it, and
        `extra` that of more fields, without braces."""
        tail = f'], "usage": {usage}' if usage else self._tail
        more = ", " + extra if extra else ""
        return (self._head + choice + tail + more + "}\n\n").encode("ascii")

    def last(self, usage: str, timing: str) -> bytes:
        """The last chunk before `DONE`: no choices, and those of the two, as JSON, that are given;
        without any it is none."""
        fields = (f', "usage": {usage}' if usage else "") + (
            f', "kvrelay_timing": {timing}' if timing else ""
        )
        return (self._head + "]" + fields + "}\n\n").encode("ascii") if fields else b""
