"""The pure parts of `loadtests/serve_bench.py`: streams understood, figures, claims, orders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from loadtests.serve_bench import Turns, parser
from loadtests.serving.client import Answer, Exchange, Request, Server, read
from loadtests.serving.figures import (
    AGAIN,
    BARS,
    OURS,
    Bar,
    Visit,
    again_ratios,
    gap_figures,
    percentile,
    ratios,
    samples_of,
    tokens_within,
    whole_figures,
)
from loadtests.serving.report import Run, Verdict, as_json, rows, verdict
from loadtests.serving.scenarios import Prompts, gap_rows


def event(text: str, tokens: int | None = None) -> bytes:
    usage = None if tokens is None else {"completion_tokens": tokens}
    return f"data: {json.dumps({'choices': [{'text': text}], 'usage': usage})}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def exchange(*pieces: tuple[float, bytes], status: int = 200, cut: bool = False) -> Exchange:
    return Exchange(1.0, status, list(pieces), ended_s=9.0, cut=cut, complete=not cut)


def answer(*times_s: float, tokens: int = 0, error: str = "", ended_s: float = 9.0) -> Answer:
    return Answer(0.0, times_s, tokens or len(times_s), ended_s, error)


def steady(*times_s: float) -> Answer:
    return replace(answer(*times_s), cut=True)


def test_an_answer_has_the_times_of_its_events_with_text_and_its_usage() -> None:
    got = read(exchange((2.0, event("")), (3.0, event("a")), (4.0, event("b") + USAGE + DONE)))
    assert got == Answer(1.0, [3.0, 4.0], 3, 9.0, "")
    assert got.ttft_s == 2.0


def test_an_event_cut_in_two_counts_from_its_second_half() -> None:
    whole = event("ab")
    got = read(exchange((2.0, whole[:9]), (3.0, whole[9:] + USAGE + DONE)))
    assert got.times_s == [3.0]


def test_a_stream_that_we_cut_counts_its_events_unless_it_tells_its_usage() -> None:
    events = ((2.0, event("a")), (3.0, event("b")))
    assert read(exchange(*events, cut=True)).tokens == 2
    told = ((2.0, event("a", 1)), (3.0, event("bc", 3)))
    assert read(exchange(*told, cut=True)) == Answer(1.0, [2.0, 3.0], 3, 9.0, "", cut=True)


@pytest.mark.parametrize(
    ("pieces", "status", "error"),
    [
        ([(2.0, event("a") + USAGE)], 200, "the stream ended without [DONE]"),
        ([(2.0, event("a") + DONE)], 200, "the stream told no usage"),
        ([(2.0, b'{"error": "full"}')], 429, 'status 429: {"error": "full"}'),
        ([(2.0, b'data: {"error": "lost"}\n\n' + DONE)], 200, '{"error": "lost"}'),
        ([], 0, "the stream ended without [DONE]"),
    ],
)
def test_what_is_no_orderly_end_is_an_error(
    pieces: list[tuple[float, bytes]], status: int, error: str
) -> None:
    assert read(exchange(*pieces, status=status)).error == error


def test_a_request_is_greedy_of_exact_length_and_in_the_servers_dialect() -> None:
    server = Server(80, "m", {"cache_prompt": False})
    head, _, body = server.message(Request([5, 6], 7)).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body) == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "min_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
    }


def test_percentiles_are_values_that_were_seen() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert math.isnan(percentile([], 0.5))


def test_a_gap_belongs_to_the_window_in_which_it_ends() -> None:
    stream = answer(1.0, 2.0, 5.0, 6.0)
    assert gap_figures([stream], 0.0, 3.0)["gap_max_ms"] == 1000.0
    assert gap_figures([stream], 3.0, 6.0)["gap_max_ms"] == 3000.0


def test_failed_requests_give_no_tokens_but_take_their_time() -> None:
    good, bad = answer(1.0, 2.0, ended_s=2.0), answer(1.0, error="lost", ended_s=4.0)
    figures = whole_figures([good, bad], begun_s=0.0)
    assert (figures["tokens_per_s"], figures["failures"]) == (0.5, 1)
    assert figures["ttft_p90_ms"] == 1000.0
    assert figures["events_per_token"] == 1.0


def test_tokens_in_a_window_follow_the_events_there() -> None:
    assert tokens_within(answer(1.0, 2.0, 3.0, 4.0, tokens=8), 2.0, 4.0) == 4.0
    assert tokens_within(answer(error="lost"), 0.0, 9.0) == 0.0


def test_the_gap_scenario_compares_the_loaded_window_with_the_lone_one() -> None:
    streams = [steady(1.0, 2.0, 3.0, 7.0, 8.0)]
    longs = [answer(6.0, 6.5, ended_s=6.5), answer(error="lost")]
    got = gap_rows(streams, longs, (1.0, 4.0, 9.0))
    assert got["gap_alone"]["gap_max_ms"] == 1000.0
    assert got["gap_alone"]["tokens_per_s"] == 1.0
    assert got["gap_load"]["gap_growth"] == 4.0
    assert got["gap_load"]["tokens_per_s"] == (2 + 2) / 5
    assert got["gap_load"]["long_ttft_median_ms"] == 6000.0
    assert got["gap_load"]["failures"] == 1


def test_a_steady_stream_that_ends_by_itself_is_a_failure() -> None:
    got = gap_rows([steady(1.0, 2.0, 3.0), answer(1.0, 2.0, 3.0)], [], (1.0, 2.5, 4.0))
    assert got["gap_load"]["failures"] == 1


def test_prompts_repeat_for_a_seed_and_differ_for_another() -> None:
    words = range(1000)
    first, same, other = (Prompts(words, seed) for seed in ("a", "a", "b"))
    prompt = first.take(32)
    assert len(prompt) == 32
    assert prompt == same.take(32)
    assert prompt != first.take(32)
    assert prompt != other.take(32)


def visits(figure: str, **by_system: Sequence[float]) -> list[Visit]:
    return [
        Visit(block, system.replace("_", " "), "row", {figure: value})
        for system, values in by_system.items()
        for block, value in enumerate(values)
    ]


def samples(seen: Sequence[Visit]) -> dict[str, dict[int, float]]:
    return samples_of(seen, "row", next(iter(seen[0].figures)))


def test_ratios_are_to_the_blocks_better_peer() -> None:
    rates = samples(visits("x_per_s", kvrelay=[6.0, 6.0], a=[3.0, 2.0], b=[2.0, 4.0]))
    assert ratios(rates, "x_per_s") == [2.0, 1.5]
    times = samples(visits("x_ms", kvrelay=[6.0, 6.0], a=[3.0, 2.0], b=[2.0, 4.0]))
    assert ratios(times, "x_ms") == [3.0, 3.0]


def test_the_second_pass_is_compared_with_the_first_and_is_no_peer() -> None:
    seen = samples(visits("x_ms", kvrelay=[4.0, 5.0], kvrelay_again=[5.0, 5.0]))
    assert again_ratios(seen) == [1.25, 1.0]
    assert ratios(seen, "x_ms") == []


def test_a_figure_that_is_no_number_is_no_sample() -> None:
    assert samples(visits("x_ms", kvrelay=[math.nan, 2.0])) == {OURS: {1: 2.0}}


def test_rows_hold_medians_and_intervals() -> None:
    seen = visits("x_per_s", kvrelay=[4.0, 6.0, 8.0], vllm=[2.0, 2.0, 2.0])
    assert [row.as_json() for row in rows(seen)] == [
        {
            "scenario": "row",
            "figure": "x_per_s",
            "kvrelay": 6.0,
            "vllm": 2.0,
            "ratio_median": 3.0,
            "ratio_low": 2.0,
            "ratio_high": 4.0,
        }
    ]


def test_a_bar_is_told_only_where_there_is_something_to_tell() -> None:
    ratio = Bar("row", "x_per_s", 1.5, of_ratio=True)
    alone = visits("x_per_s", kvrelay=[4.0])
    assert verdict(ratio, alone) == Verdict("row: x_per_s / better peer >= 1.5", None, None)
    assert verdict(ratio, [*alone, *visits("x_per_s", vllm=[2.0])]).holds is True
    own = Bar("row", "x_ms", 3.0, of_ratio=False)
    assert verdict(own, visits("x_ms", kvrelay=[4.0])).holds is False


def test_the_json_has_every_bar_and_every_visit() -> None:
    told = json.loads(as_json(Run({}, visits("x_ms", kvrelay=[4.0]), {"seed": "0"})))
    assert len(told["bars"]) == len(BARS)
    assert told["visits"] == [
        {"block": 0, "system": "kvrelay", "row": "row", "figures": {"x_ms": 4.0}}
    ]


def test_a_block_visits_each_system_once_and_ours_again_in_an_order_of_its_own() -> None:
    turns = Turns(["s", "t"], blocks=2, seed=1, again=True)
    orders = [turns.of_block(block, [OURS, "a", "b"]) for block in range(8)]
    for order in orders:
        assert [scenario for scenario, _ in order] == ["s"] * 4 + ["t"] * 4
        assert sorted(name for _, name in order[:4]) == ["a", "b", OURS, AGAIN]
    assert orders[0] == turns.of_block(0, [OURS, "a", "b"])
    assert len({tuple(order) for order in orders}) > 1


def test_sizes_are_flags() -> None:
    given = parser().parse_args(["--long-tokens", "100", "--alone-s", "2.5"])
    assert (given.long_tokens, given.alone_s, given.waves) == (100, 2.5, 3)


def test_a_size_must_be_above_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--waves", "0"])
    assert "argument --waves: must be a number above 0, not '0'" in capsys.readouterr().err
