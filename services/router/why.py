"""Why a request's first token came when it did, in words: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvrelay.shared.telemetry.spans import RequestRecord, SpanRecord

LATE: Final = 1.25
"""So many times what was predicted is told as late."""
ADVICE: Final[Mapping[str, str]] = {
    "gateway": "Reading, checking and tokenising the request: a router with less to do, or a "
    "shorter prompt, helps.",
    "choose workers": "No worker could be given it sooner: see which are ready, and whether the "
    "queue is full.",
    "prefill queue": "Other prompts were before it: more prefill workers, or fewer long prompts at "
    "once, help.",
    "prefill": "The prompt itself: a shared prefix that is cached, or more compute per prefill "
    "worker, helps.",
    "to the client": "Between the worker and the client's stream: a router that is busy, or a "
    "network between them.",
}


def why(record: RequestRecord) -> str:
    """What the time to the first token was, what most of it went into, and what would help."""
    if record.ttft_s is None:
        return _waiting(record)
    ttft_ms = record.ttft_s * 1e3
    text = [f"The first token came after {_ms(ttft_ms)}."]
    parts = parts_of_ttft_ms(record)
    if parts:
        name, most_ms = max(parts.items(), key=lambda item: item[1])
        told = ", ".join(f"{part} {_ms(ms)}" for part, ms in parts.items() if ms >= 0.05)
        text.append(f"Of that: {told}.")
        computed = record.prompt_tokens - record.cached_tokens
        if name == "prefill":
            text.append(f"{computed} of {record.prompt_tokens} prompt tokens had to be computed.")
        if most_ms >= ttft_ms / 3:
            text.append(ADVICE[name])
    chosen = record.spans[0].attributes
    predicted = chosen.get("kvrelay.route.predicted_ttft_s")
    if chosen.get("kvrelay.route.measured") is False:
        text.append(f"No rates were measured yet when its route was chosen, {record.route}.")
    elif isinstance(predicted, int | float) and predicted > 0:
        late = "" if record.ttft_s <= LATE * predicted else ", so it was later than expected"
        text.append(f"{_ms(predicted * 1e3)} were predicted for the route, {record.route}{late}.")
    if record.attempts > 1:
        text.append(f"It took {record.attempts} attempts: a worker went, or a transfer failed.")
    return " ".join(text)


def parts_of_ttft_ms(record: RequestRecord) -> dict[str, float]:
    """By name, in order; they add up to the time to the first token. Of an answer with several
    choices or attempts the workers' parts are those of the attempt that began first."""
    if record.ttft_s is None:
        return {}
    own = {span.name: _took_ms(span) for span in record.spans if span.parent == 0}
    parts: dict[str, float] = {
        name: own[name] for name in ("gateway", "choose workers") if name in own
    }
    rest_ms = max(record.ttft_s * 1e3 - sum(parts.values()), 0.0)
    worker = next((span.part for span in record.spans if span.name == "prefill queue"), "")
    for name in ("prefill queue", "prefill"):
        found = next((s for s in record.spans if s.part == worker and s.name == name), None)
        if found is not None:
            parts[name] = min(_took_ms(found), rest_ms)
            rest_ms -= parts[name]
    if worker:
        parts["to the client"] = rest_ms
    else:
        parts["prefill"] = rest_ms
    return parts


def timing_ms(record: RequestRecord) -> dict[str, float]:
    """The same for programs: the parts add up to `ttft`, and with `stream` to `total`. What no
    computation hid of the relay is a part of `stream`."""
    out = {name.replace(" ", "_"): ms for name, ms in parts_of_ttft_ms(record).items()}
    if record.ttft_s is not None:
        out["ttft"] = record.ttft_s * 1e3
    if record.duration_s is not None:
        out["stream"] = (record.duration_s - (record.ttft_s or 0.0)) * 1e3
        out["total"] = record.duration_s * 1e3
    exposed = [_took_ms(span) for span in record.spans if span.name == "relay exposed"]
    if exposed:
        out["relay_exposed"] = max(exposed)
    return {f"{name}_ms": round(ms, 3) for name, ms in out.items()}


def _waiting(record: RequestRecord) -> str:
    if record.outcome is not None:
        return "It ended before its first token."
    return "No token has come yet." if record.route else "It waits for workers."


def _took_ms(span: SpanRecord) -> float:
    return 0.0 if span.end_ns is None else (span.end_ns - span.start_ns) / 1e6


def _ms(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
