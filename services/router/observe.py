"""What the router tells about requests: metrics, spans and the ledger, from one timeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvrelay.services.router.choreography import LegMachine, Stage
from kvrelay.services.router.flight import Flight, FlightRecorder
from kvrelay.services.router.lately import Lately
from kvrelay.services.router.route import Route
from kvrelay.shared.clock import Clock
from kvrelay.shared.errors import (
    DeadlineExceeded,
    KvrelayError,
    Overloaded,
    RequestError,
    TokenConflict,
    Unavailable,
)
from kvrelay.shared.rpc.convert import ref_from_wire, timeline_from_wire
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.store.ledger import Ledger, LedgerEvent, Phase
from kvrelay.shared.telemetry.labels import (
    Endpoint,
    Outcome,
    RouteReason,
    StageKind,
    UsageKind,
)
from kvrelay.shared.telemetry.metrics import RouterMetrics
from kvrelay.shared.telemetry.spans import RequestRecord, SpanRecord, Value
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.telemetry.tracing import RequestTrace, Tracing
from kvrelay.shared.types import LegRef, ValidRequest

log = logging.getLogger(__name__)

PHASES = {
    Stage.QUEUED: Phase.QUEUED,
    Stage.PREFILLING: Phase.PREFILLING,
    Stage.HANDING_OFF: Phase.HANDING_OFF,
    Stage.DECODING: Phase.DECODING,
}
OUTCOMES: tuple[tuple[type[KvrelayError], Outcome], ...] = (
    (RequestError, Outcome.BAD_REQUEST),
    (Overloaded, Outcome.OVERLOADED),
    (Unavailable, Outcome.UNAVAILABLE),
    (DeadlineExceeded, Outcome.DEADLINE),
    (TokenConflict, Outcome.CONFLICT),
    (KvrelayError, Outcome.FAILED),
)


def outcome_of(error: KvrelayError) -> Outcome:
    return next(outcome for kind, outcome in OUTCOMES if isinstance(error, kind))


def route_reason(route: Route) -> RouteReason:
    """What decided: the first of the reasons that holds."""
    if route.lacks_room:
        return RouteReason.NO_ROOM
    if route.first.held_tokens:
        return RouteReason.HELD
    return RouteReason.PREDICTED if route.measured else RouteReason.UNMEASURED


def endpoint_of(request: ValidRequest) -> Endpoint:
    return Endpoint.CHAT if request.chat else Endpoint.COMPLETIONS


def route_attributes(route: Route) -> dict[str, str | int | float]:
    """Of a span: what was chosen, what it was expected to cost, and why."""
    terms = {f"kvrelay.route.{name}": value for name, value in asdict(route.terms).items()}
    decode = {"kvrelay.route.decode_held_tokens": route.decode.held_tokens} if route.decode else {}
    return {
        "kvrelay.route.kind": route.kind.value,
        "kvrelay.route.measured": route.measured,
        "kvrelay.route.predicted_ttft_s": route.terms.ttft_s,
        "kvrelay.route.held_tokens": route.first.held_tokens,
        **decode,
        **terms,
    }


OWN: tuple[tuple[str, Moment, Moment], ...] = (
    ("gateway", Moment.RECEIVED, Moment.CHECKED),
    ("choose workers", Moment.CHECKED, Moment.ASSIGNED),
    ("first token", Moment.ASSIGNED, Moment.FIRST_TOKEN),
    ("stream", Moment.FIRST_TOKEN, Moment.FINISHED),
)
"""A router's own spans: (name, from, to). They follow each other without a gap."""


def own_spans(timeline: Timeline, route: Mapping[str, Value]) -> tuple[SpanRecord, ...]:
    """The request as a whole, which has what was chosen for it, and its parts; the last one lasts
    while the request does."""
    begun_ns, ended_ns = timeline.at_ns(Moment.RECEIVED), timeline.at_ns(Moment.FINISHED)
    spans = [SpanRecord("request", "router", begun_ns or 0, ended_ns, None, route)]
    for name, start, end in OWN:
        start_ns, end_ns = timeline.at_ns(start), timeline.at_ns(end)
        if start_ns is not None:
            spans.append(
                SpanRecord(name, "router", start_ns, ended_ns if end_ns is None else end_ns, 0)
            )
    return tuple(spans)


@dataclass(slots=True)
class Observer:
    """Makes a `RequestWatch` for each accepted request and counts those in flight."""

    metrics: RouterMetrics
    tracing: Tracing
    ledger: Ledger
    clock: Clock
    in_flight: int = 0
    flight: FlightRecorder = field(default_factory=FlightRecorder)
    lately: Lately = field(default_factory=Lately)

    def begin(self, request: ValidRequest) -> RequestWatch:
        self.in_flight += 1
        self.metrics.request_accepted(endpoint_of(request))
        received_ns = request.received_ns or self.clock.now_ns()
        watch = RequestWatch(self, request, self.tracing.begin(request.trace_headers, received_ns))
        watch.timeline.stamp(Moment.RECEIVED, received_ns)
        watch.timeline.stamp(Moment.CHECKED, self.clock.now_ns())
        watch.received_s = self.clock.wall_ns() / 1e9
        watch.flight = self.flight.begin(request.request_id, watch.record)
        return watch

    def heard(self, worker: str, ended: pb.Ended) -> None:
        """A worker ended an attempt, and tells what it did for it."""
        told, now_ns = ended.timeline, self.clock.now_ns()
        pieces = timeline_from_wire(told)
        self.flight.heard(ref_from_wire(ended.ref), worker, pieces, told.now_ns, now_ns)


@dataclass(slots=True)
class RequestWatch:
    """One request's timeline and counts; `ended` reports them once."""

    observer: Observer
    request: ValidRequest
    trace: RequestTrace
    timeline: Timeline = field(default_factory=Timeline)
    tokens: int = 0
    attempts: int = 0
    retries: int = 0
    """Of the attempts those that replaced another."""
    cached: dict[int, int] = field(default_factory=dict)
    """Of each prompt, by the number of its first leg: tokens that nobody had to compute."""
    error: KvrelayError | None = None
    answered: bool = True
    routes: dict[int, tuple[int, Route]] = field(default_factory=dict)
    """By leg: when its last route was chosen, until its first token came."""
    first_route: Route | None = None
    stages: dict[int, Stage] = field(default_factory=dict)
    relays: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """By leg, until its KV is there: from whom to whom, and of how many tokens."""
    received_s: float = 0.0
    outcome: Outcome | None = None
    flight: Flight = field(init=False)
    names: dict[str, str] = field(default_factory=dict)
    """Of the workers that were chosen, by incarnation."""
    entered_ns: dict[int, int] = field(default_factory=dict)
    """By leg: when it entered its stage."""
    latest_ns: dict[int, int] = field(default_factory=dict)
    """By leg: when its latest token came."""

    @property
    def traceparent(self) -> str:
        return self.trace.headers.get("traceparent", "")

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def _stamp(self, moment: Moment) -> None:
        self.timeline.stamp(moment, self.observer.clock.now_ns())

    def token(self, leg: int) -> None:
        now_ns = self.observer.clock.now_ns()
        lately, latest_ns = self.observer.lately, self.latest_ns.get(leg)
        if not self.tokens:
            self.timeline.stamp(Moment.FIRST_TOKEN, now_ns)
            lately.first_token(now_ns, self.timeline.at_ns(Moment.RECEIVED) or now_ns)
        else:
            lately.token(now_ns, None if latest_ns is None else now_ns - latest_ns)
        self.latest_ns[leg] = now_ns
        if latest_ns is not None:
            self.observer.metrics.token_gap((now_ns - latest_ns) / 1e9)
        self.tokens += 1

    def routed(self, machine: LegMachine, route: Route) -> None:
        """Workers for the leg's next attempt were chosen."""
        self.observer.metrics.routed(route.kind, route_reason(route))
        self.first_route = self.first_route or route
        for site in (route.first, route.decode):
            if site is not None:
                self.names[site.name] = site.worker.record.name
        self.relays.pop(machine.number, None)
        if (decode := route.decode) is not None:
            known = len(machine.spec.prompt) + len(machine.tokens)
            lacking = max(known - decode.held_tokens, 0)
            self.relays[machine.number] = (route.first.name, decode.name, lacking)
        if machine.spec.choice == 0 and not machine.tokens:
            self.routes[machine.number] = (self.observer.clock.now_ns(), route)

    def first_token(self, leg: int) -> None:
        """The first one that a route gave: was it as far away as predicted?"""
        if (routed := self.routes.pop(leg, None)) is None:
            return
        chosen_ns, route = routed
        took_s = (self.observer.clock.now_ns() - chosen_ns) / 1e9
        if route.measured:
            self.observer.metrics.predicted(route.kind, route.terms.ttft_s, took_s)

    def stage(self, machine: LegMachine, stage: Stage) -> None:
        """A leg entered a stage (or began it anew with a token)."""
        if self.stages.get(machine.number) is stage:
            return
        self._stage_over(machine.number)
        self.stages[machine.number] = stage
        self.entered_ns[machine.number] = self.observer.clock.now_ns()
        if stage is Stage.QUEUED:
            self._stamp(Moment.ASSIGNED)
            self.attempts += 1
            self.retries += machine.attempt > 0
            self.observer.metrics.attempt_begun(machine.cause)
        elif stage is Stage.DECODING and machine.split:
            self._stamp(Moment.PUBLISHED)
            if (relay := self.relays.pop(machine.number, None)) is not None:
                self.observer.lately.handed(*relay)
        if stage in PHASES:
            self._journal(machine, PHASES[stage])

    def _stage_over(self, leg: int) -> None:
        if (entered_ns := self.entered_ns.pop(leg, None)) is not None:
            seconds = (self.observer.clock.now_ns() - entered_ns) / 1e9
            self.observer.metrics.stage_over(StageKind(self.stages[leg].value), seconds)

    def leg_ended(self, machine: LegMachine, error: KvrelayError | None) -> None:
        self._stage_over(machine.number)
        if machine.cached_tokens is not None:
            # The choices of one prompt share it: the one that computed most of it says how much.
            prompt = machine.number - machine.spec.choice
            least = self.cached.get(prompt, machine.cached_tokens)
            self.cached[prompt] = min(least, machine.cached_tokens)
        phase = Phase.FINISHED if machine.answered else Phase.CANCELLED
        if error is not None:
            self.error = self.error or error
            phase = Phase.FAILED
        self.answered = self.answered and machine.answered
        self._journal(machine, phase)

    def ended(self) -> None:
        """All legs have ended: the one report of this request."""
        self._stamp(Moment.FINISHED)
        observer, request = self.observer, self.request
        observer.in_flight -= 1
        outcome = Outcome.OK if self.answered else Outcome.CANCELLED
        if self.error is not None:
            outcome = outcome_of(self.error)
        observer.lately.ended(observer.clock.now_ns())
        self.outcome = outcome
        observer.flight.end(request.request_id)
        tokens = {
            UsageKind.PROMPT: request.prompt_tokens,
            UsageKind.CACHED: self.cached_tokens,
            UsageKind.COMPLETION: self.tokens,
        }
        self._log(outcome)
        observer.metrics.request_ended(endpoint_of(request), outcome, self.timeline, tokens)
        observer.tracing.spans_from(self.timeline, self.trace, "router", self._attributes(outcome))

    def sent(self, ref: LegRef, worker: str) -> None:
        """An attempt was given to a worker."""
        name = self.names.get(worker, worker)
        self.flight.sent(ref, worker, name, self.observer.clock.now_ns())

    def record(self) -> RequestRecord:
        """How it stands, as far as the router itself knows."""
        route = self.first_route
        return RequestRecord(
            id=self.request.request_id,
            trace_id=self.traceparent[3:35],
            endpoint="chat" if self.request.chat else "completions",
            model=self.request.model,
            received_s=self.received_s,
            received_ns=self.timeline.at_ns(Moment.RECEIVED) or 0,
            outcome=None if self.outcome is None else self.outcome.value,
            route="" if route is None else route.kind.value,
            prompt_tokens=self.request.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.tokens,
            attempts=1 + self.retries if self.attempts else 0,
            ttft_s=self.timeline.ttft_s,
            duration_s=self.timeline.duration_s,
            spans=own_spans(self.timeline, {} if route is None else route_attributes(route)),
        )

    def _log(self, outcome: Outcome) -> None:
        """What an answer took, and of one that failed why: never what was asked or answered."""
        failed = self.error is not None
        level = logging.WARNING if failed else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        named = {
            "request": self.request.request_id,
            "trace": self.traceparent.split("-")[1] if self.traceparent else "",
            "reason": type(self.error).__name__ if failed else "",
        }
        log.log(
            level,
            "ended %s: %d prompt tokens, %d cached, %d of the answer, %d attempts, %.3f s",
            outcome.value,
            *(self.request.prompt_tokens, self.cached_tokens, self.tokens, self.attempts),
            self.timeline.duration_s or 0.0,
            extra=named,
        )

    def _attributes(self, outcome: Outcome) -> dict[str, str | int | float]:
        sampling = self.request.legs[0].sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": "chat" if self.request.chat else "text_completion",
            "gen_ai.provider.name": "kvrelay",
            "gen_ai.request.model": self.request.model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.response.id": self.request.request_id,
            "gen_ai.usage.input_tokens": self.request.prompt_tokens,
            "gen_ai.usage.output_tokens": self.tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "kvrelay.attempts": self.attempts,
            "kvrelay.outcome": outcome.value,
        }
        if self.first_route is not None:
            attributes |= route_attributes(self.first_route)
        ttft_s = self.timeline.ttft_s
        if ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = ttft_s
        if self.error is not None:
            attributes["error.type"] = type(self.error).__name__
        return attributes

    def _journal(self, machine: LegMachine, phase: Phase) -> None:
        self.observer.ledger.record(
            LedgerEvent(
                request_id=machine.spec.leg,
                phase=phase,
                attempt=max(machine.attempt, 0),
                prefill=machine.prefill_incarnation,
                decode=machine.decode_incarnation,
                prompt_tokens=len(machine.spec.prompt),
                output_tokens=len(machine.tokens),
                nonce=machine.nonce,
            )
        )
