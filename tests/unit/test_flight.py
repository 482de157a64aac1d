"""What a router remembers of requests: workers' pieces on its own clock, and why in words."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.services.router.flight import ENDED, FlightRecorder
from kvrelay.services.router.observe import own_spans
from kvrelay.services.router.why import parts_of_ttft_ms, why
from kvrelay.shared.rpc.convert import timeline_from_wire, timeline_to_wire
from kvrelay.shared.telemetry.spans import Heard, Piece, RequestRecord, SpanRecord, placed
from kvrelay.shared.telemetry.timeline import Moment, Timeline
from kvrelay.shared.types import LegRef

MS = 1_000_000
TIMES = st.integers(0, 2**62)
PIECES = st.lists(st.builds(Piece, st.just("p"), TIMES, TIMES, st.integers(-3, 9)), max_size=9)


def record(**changed: object) -> RequestRecord:
    timeline = Timeline()
    for moment, at_ms in (
        (Moment.RECEIVED, 0),
        (Moment.CHECKED, 2),
        (Moment.ASSIGNED, 5),
        (Moment.FIRST_TOKEN, 105),
        (Moment.FINISHED, 300),
    ):
        timeline.stamp(moment, at_ms * MS)
    told = RequestRecord(
        id="r",
        trace_id="",
        endpoint="chat",
        model="m",
        received_s=0.0,
        received_ns=0,
        outcome="ok",
        route="split",
        prompt_tokens=100,
        cached_tokens=40,
        output_tokens=9,
        attempts=1,
        ttft_s=timeline.ttft_s,
        duration_s=timeline.duration_s,
        spans=own_spans(timeline, {"kvrelay.route.predicted_ttft_s": 0.05}),
    )
    return replace(told, **changed)  # type: ignore[arg-type]


WORKER = (
    Piece("prefill worker", 1000 * MS, 1120 * MS),
    Piece("prefill queue", 1000 * MS, 1030 * MS),
    Piece("prefill", 1030 * MS, 1098 * MS),
    Piece("compute chunk", 1030 * MS, 1060 * MS, 2, 32),
)


@given(PIECES, TIMES, TIMES, TIMES)
def test_whatever_a_worker_says_its_spans_lie_within_each_other(
    pieces: list[Piece], sent_ns: int, heard_ns: int, told_ns: int
) -> None:
    spans = placed("w", pieces, Heard(sent_ns, heard_ns, told_ns))
    assert len(spans) == len(pieces)
    for number, span in enumerate(spans):
        assert span.end_ns is not None and span.start_ns <= span.end_ns <= heard_ns
        assert (span.parent is None) == (number == 0)
        if span.parent is not None:
            outer = spans[span.parent]
            assert span.parent < number and outer.start_ns <= span.start_ns
            assert outer.end_ns is not None and span.end_ns <= outer.end_ns
        if sent_ns <= heard_ns:
            assert span.start_ns >= sent_ns


def test_a_worker_s_clock_is_told_by_both_ways() -> None:
    """Sent at 6, begun at 1000 there; ended at 1120, heard at 130: each way took 2."""
    spans = placed("p", WORKER, Heard(6 * MS, 130 * MS, 1120 * MS))
    assert [(span.start_ns / MS, (span.end_ns or 0) / MS) for span in spans] == [
        (8, 128),
        (8, 38),
        (38, 106),
        (38, 68),
    ]
    assert spans[3].attributes == {"kvrelay.tokens": 32}


def test_pieces_cross_the_wire() -> None:
    wire = timeline_to_wire(WORKER, 7)
    assert timeline_from_wire(type(wire).FromString(wire.SerializeToString())) == WORKER


def test_workers_are_heard_while_a_request_runs_and_after_it_ended() -> None:
    flights = FlightRecorder()
    flight = flights.begin("r", record)
    ref, other = LegRef("r/0", 0, 1), LegRef("r/0", 1, 2)
    flight.sent(ref, "aa", "prefill-0", 6 * MS)
    flight.sent(other, "bb", "decode-0", 6 * MS)
    flights.heard(ref, "aa", WORKER, 1120 * MS, 130 * MS)
    flights.heard(ref, "aa", WORKER, 1120 * MS, 130 * MS)
    flights.heard(ref, "cc", WORKER, 1120 * MS, 130 * MS)
    flights.end("r")
    flights.heard(other, "bb", WORKER[:1], 1120 * MS, 130 * MS)
    flights.heard(LegRef("unknown/0", 0, 1), "aa", WORKER, 1120 * MS, 130 * MS)
    found = flights.find("r")
    assert found is not None
    own = len(record().spans)
    assert [(span.part, span.parent) for span in found.spans[own:]] == [
        ("prefill-0", 0),
        ("prefill-0", own),
        ("prefill-0", own),
        ("prefill-0", own + 2),
        ("decode-0", 0),
    ]
    attempts = [span.attributes["kvrelay.attempt"] for span in found.spans[own:] if not span.parent]
    assert attempts == [0, 1]
    assert flights.find("other") is None


def test_so_many_are_kept_and_no_more() -> None:
    flights = FlightRecorder()
    for number in range(ENDED + 5):
        flights.begin(str(number), record)
        flights.end(str(number))
    assert flights.find("4") is None and flights.find("5") is not None
    assert len(flights.recent(10 * ENDED)) == ENDED


def with_worker() -> RequestRecord:
    own = record()
    worker = placed("prefill-0", WORKER, Heard(6 * MS, 130 * MS, 1120 * MS))
    base = len(own.spans)
    moved = (replace(s, parent=0 if s.parent is None else base + s.parent) for s in worker)
    return replace(own, spans=(*own.spans, *moved))


def test_the_parts_of_the_first_token_s_time_add_up() -> None:
    for told in (record(), with_worker(), record(attempts=2)):
        parts = parts_of_ttft_ms(told)
        assert told.ttft_s is not None
        assert abs(sum(parts.values()) - told.ttft_s * 1e3) < 1e-9
        assert all(ms >= 0 for ms in parts.values())
    assert parts_of_ttft_ms(with_worker()) == {
        "gateway": 2,
        "choose workers": 3,
        "prefill queue": 30,
        "prefill": 68,
        "to the client": 2,
    }
    assert parts_of_ttft_ms(record(ttft_s=None)) == {}


def test_why_names_the_largest_part_and_what_was_expected() -> None:
    text = why(with_worker())
    assert "105 ms" in text and "prefill 68 ms" in text and "60 of 100 prompt tokens" in text
    assert "50 ms were predicted" in text and "later than expected" in text
    assert "2 attempts" in why(record(attempts=2))
    assert "before its first token" in why(record(ttft_s=None))
    assert "No token has come yet" in why(record(ttft_s=None, outcome=None))


def test_a_request_in_flight_has_a_span_that_lasts() -> None:
    timeline = Timeline()
    timeline.stamp(Moment.RECEIVED, 1)
    timeline.stamp(Moment.CHECKED, 2)
    assert own_spans(timeline, {}) == (
        SpanRecord("request", "router", 1, None),
        SpanRecord("gateway", "router", 1, 2, 0),
        SpanRecord("choose workers", "router", 2, None, 0),
    )
