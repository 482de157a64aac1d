"""Traces over all processes, made after the fact from timelines.

A request's spans are made when it has ended; only its own is opened at its start, so that its id
can travel to other processes (as W3C headers) before. Nothing here is on the path of a token.
Without the standard `OTEL_EXPORTER_OTLP_*` variables a caller's headers are just passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.shared.clock import Clock
from kvrelay.shared.telemetry.timeline import Moment, Timeline

if TYPE_CHECKING:
    from kvrelay.shared.telemetry.otlp import SpanSink

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]
Operation = Literal["chat", "text_completion"]
Phases = tuple[tuple[str, Moment, Moment], ...]

PHASES: Final[Mapping[str, Phases]] = {
    "router": (
        ("assign", Moment.RECEIVED, Moment.ASSIGNED),
        ("first token", Moment.ASSIGNED, Moment.FIRST_TOKEN),
        ("stream", Moment.FIRST_TOKEN, Moment.FINISHED),
    ),
    "prefill": (
        ("queue", Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
        ("compute prompt", Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
        ("transfer exposed", Moment.PREFILL_ENDED, Moment.PUBLISHED),
    ),
    "decode": (
        ("receive blocks", Moment.RECEIVED, Moment.PUBLISHED),
        ("generate", Moment.DECODE_STARTED, Moment.FINISHED),
    ),
    "both": (
        ("queue", Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
        ("compute prompt", Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
        ("generate", Moment.DECODE_STARTED, Moment.FINISHED),
    ),
}
"""The spans inside each role's own: (name, from, to). One without both stamps is left out."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One process' place in the trace of one request."""

    headers: Mapping[str, str]
    """`traceparent` and `tracestate` for the processes that work for this one; may be empty."""
    span: Span | None = None
    """The process' own span, open until `Tracing.spans_from`; None when nothing is exported."""


class Tracing:
    """One per process. Methods may be called from any thread; only `close` blocks."""

    def __init__(self, sink: SpanSink | None, wall_offset_ns: int) -> None:
        """`wall_offset_ns` turns this process' monotonic times into wall times."""
        self._sink = sink
        self._wall_offset_ns = wall_offset_ns

    @staticmethod
    def from_environment(
        service: str, instance: str, environ: Mapping[str, str], clock: Clock
    ) -> Tracing:
        """Exports if `environ` names an OTLP endpoint. Raises `ConfigError` for a bad protocol."""
        sink: SpanSink | None = None
        if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in environ):
            from kvrelay.shared.telemetry.otlp import SpanSink, wanted

            sink = SpanSink(service, instance, environ) if wanted(environ) else None
        return Tracing(sink, clock.wall_ns() - clock.now_ns())

    @property
    def enabled(self) -> bool:
        return self._sink is not None

    def begin(self, headers: Mapping[str, str], now_ns: int) -> RequestTrace:
        """Join the trace in `headers` (lower-case names), or begin one, at monotonic `now_ns`.

        A `traceparent` that is none is ignored. Whether spans are kept is the caller's choice if
        it made one, else that of `OTEL_TRACES_SAMPLER`.
        """
        w3c = TraceContextTextMapPropagator()
        context = w3c.extract(dict(headers), Context())
        span: Span | None = None
        if self._sink is not None:
            start_ns = now_ns + self._wall_offset_ns
            kind = SpanKind.SERVER
            span = self._sink.tracer.start_span("request", context, kind, start_time=start_ns)
            context = trace.set_span_in_context(span, context)
        onward: dict[str, str] = {}
        w3c.inject(onward, context)
        return RequestTrace(onward, span)

    def spans_from(
        self, timeline: Timeline, request: RequestTrace, role: str, attributes: Attributes
    ) -> None:
        """Queue one process' spans: its own, up to the last stamp, and one per phase in it.

        A router's own span is named by `gen_ai.operation.name` and `gen_ai.request.model`, any
        other by its role. `error.type` among the attributes marks it as failed. Call once.
        """
        own = request.span
        if self._sink is None or own is None:
            return
        inside = trace.set_span_in_context(own, Context())
        for name, start, end in PHASES[role]:
            start_ns, end_ns = timeline.at_ns(start), timeline.at_ns(end)
            if start_ns is not None and end_ns is not None and start_ns <= end_ns:
                start_ns += self._wall_offset_ns
                phase = self._sink.tracer.start_span(name, inside, start_time=start_ns)
                phase.end(end_ns + self._wall_offset_ns)
        own.update_name(_name(role, attributes))
        own.set_attributes(attributes)
        if "error.type" in attributes:
            own.set_status(StatusCode.ERROR)
        latest_ns = max((at_ns for _, at_ns in timeline), default=None)
        own.end(None if latest_ns is None else latest_ns + self._wall_offset_ns)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued; blocks for at most `timeout_s`, then drops the rest."""
        if self._sink is not None:
            self._sink.close(timeout_s)


def request_attributes(
    operation: Operation, model: str, prompt_tokens: int, completion_tokens: int
) -> dict[str, Attribute]:
    """What a request's span says, by the names of OpenTelemetry's conventions for GenAI."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": completion_tokens,
    }


def _name(role: str, attributes: Attributes) -> str:
    if role != "router":
        return role
    return f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
