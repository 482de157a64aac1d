"""One rule for all systems, blocks in turns, and what is claimed from them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console
from tests.unit.test_bench_cases import SMOLLM

from kvrelay.services.bench.cases import CASES, Work
from kvrelay.services.bench.drivers.serve import SPARE_OUTPUTS, Reading, measure
from kvrelay.services.bench.machine import Limits
from kvrelay.services.bench.measure import Cost, Readings, Schedule, joined, run_blocks
from kvrelay.services.bench.report import Row, breakdown_of, row_of, show
from kvrelay.services.bench.statistics import Interval, median_interval

LIMITS = Limits(20.0, 20.0, 25.0, 1000.0)
DECODE = next(case for case in CASES if case.name == "decode_b8")
PREFILL = next(case for case in CASES if case.name == "prefill_512")


Call = tuple[str, tuple[int, ...], int]
"""(system, the beginning of the first prompt, steps)"""


def ignore(what: str, done: int, in_all: int) -> None:
    """A report to nobody."""


@dataclass
class Scripted:
    """A `System` whose steps give tokens as written."""

    steps: list[list[int]]
    asked: list[int] = field(default_factory=list)
    dropped: int = 0
    spent_s: float = 0.0
    about: dict[str, object] = field(default_factory=dict)

    def begin(self, prompts: list[list[int]], outputs: int) -> None:
        self.asked.append(outputs)

    def advance(self) -> list[int]:
        self.spent_s += 0.25
        return self.steps.pop(0)

    def drop(self) -> None:
        self.dropped += 1

    def phases_s(self) -> dict[str, float]:
        return {"products": self.spent_s}


def test_prompts_are_read_when_each_has_its_first_token() -> None:
    system = Scripted([[], [0], [0, 1], [0, 1]])
    reading = measure(system, [[1, 2, 3], [4, 5]], 0)
    assert (reading.tokens, reading.steps) == (5, 3)
    assert reading.phases_s == {"products": 0.75}
    assert (system.asked, system.dropped) == ([1], 1)
    assert system.steps == [[0, 1]], "nothing was computed after that"


def test_decode_is_measured_from_there_on_and_no_request_ends_inside() -> None:
    system = Scripted([[0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]])
    reading = measure(system, [[1, 2, 3], [4, 5]], 3)
    assert (reading.tokens, reading.steps) == (6, 3)
    assert reading.phases_s == {"products": 0.75}
    assert system.asked == [3 + SPARE_OUTPUTS]
    assert len(system.steps) == 1


@dataclass
class Noting:
    """A system of which only the calls matter."""

    name: str
    log: list[Call]

    def measure(self, prompts: Sequence[Sequence[int]], steps: int) -> Reading:
        self.log.append((self.name, tuple(prompts[0][:4]), steps))
        return Reading(tokens=10, seconds=2.0, cpu_seconds=4.0, steps=1, phases_s={})


def blocks(schedule: Schedule) -> tuple[Readings, list[Call]]:
    log: list[Call] = []
    systems = [Noting(name, log) for name in ("a", "b", "c")]
    return run_blocks(systems, CASES, SMOLLM, schedule, ignore), log


def test_every_round_has_each_case_once_on_each_system_with_the_same_prompts() -> None:
    readings, log = blocks(Schedule(rounds=2, seconds=600, seed=5))
    assert {len(each) for by in readings.values() for each in by.values()} == {2}
    calls = sum(3 * case.repeats for case in CASES)
    assert len(log) == 3 * calls, "two rounds and a warm-up"
    prompts: dict[object, set[str]] = {}
    for name, prompt, steps in log:
        prompts.setdefault((prompt, steps), set()).add(name)
    assert len(prompts) == calls
    assert all(names == {"a", "b", "c"} for names in prompts.values())


def test_the_order_is_random_and_comes_from_the_seed() -> None:
    schedule = Schedule(rounds=1, seconds=600, seed=5)
    assert blocks(schedule)[1] == blocks(schedule)[1]
    others = [[call[0] for call in blocks(replace(schedule, seed=s))[1]] for s in (5, 6)]
    assert others[0] != others[1]


def test_one_round_is_measured_however_little_time_there_is() -> None:
    readings, _ = blocks(Schedule(rounds=50, seconds=1e-9, seed=0))
    assert len(readings["decode_b8"]["a"]) == 1


def test_repeats_are_added_up() -> None:
    one = Reading(tokens=10, seconds=2.0, cpu_seconds=4.0, steps=1, phases_s={"products": 0.5})
    assert joined([one, one]) == Reading(20, 4.0, 8.0, 2, {"products": 1.0})


def test_an_interval_holds_the_median_and_knows_no_more_than_the_values() -> None:
    assert median_interval([1.5]) == Interval(1.5, 1.5, 1.5)
    assert median_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)
    interval = median_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert interval == Interval(3.0, 1.0, 100.0)
    many = median_interval([float(value) for value in range(101)])
    assert many.median == 50.0
    assert 30 < many.low < 45 < 55 < many.high < 70


def readings_of(*rates: float) -> list[Reading]:
    """Blocks of 64 decode steps of 8, of 10 ms by each of two kinds of work."""
    phases = {"products": 0.64, "attention": 0.32, "rest": 0.0}
    return [Reading(512, 512 / rate, 2.0, 64, phases) for rate in rates]


def decode_row() -> Row:
    by_system = {
        "kvrelay": readings_of(400, 480, 400),
        "kvrelay_again": readings_of(400, 400, 400),
        "vllm": readings_of(200, 240, 160),
        "llamacpp": readings_of(100, 300, 100),
    }
    return row_of(DECODE, by_system, Work(250_000_000, 0, 5), LIMITS, products_ms=8.0)


def test_the_ratio_is_to_the_peer_that_is_better_here_block_by_block() -> None:
    row = decode_row()
    assert row.peer == "vllm"
    assert row.ratio == Interval(2.0, 2.0, 2.5)
    assert row.again == Interval(1.0, 1.0, 1.2)
    assert row.limit_tokens_per_s == 1000.0


def test_a_step_is_what_its_parts_are() -> None:
    parts = breakdown_of(readings_of(400), DECODE)
    assert parts.step_ms == pytest.approx(20.0)
    expected = {"matmul": 10.0, "attention": 5.0, "rest": 0.0, "python": 5.0}
    assert parts.parts_ms == pytest.approx(expected)
    assert parts.shares()["python"] == pytest.approx(0.25)
    prompts = [Reading(1536, 0.6, 1.2, 6, {"products": 0.3, "attention": 0.15, "rest": 0.0})]
    assert breakdown_of(prompts, PREFILL).step_ms == pytest.approx(200.0)


def test_json_has_the_agreed_names() -> None:
    row = decode_row().as_json()
    assert row["case"] == "decode_b8"
    assert row["kvrelay_tokens_per_s"] == 400.0
    assert row["vllm_tokens_per_s"] == 200.0
    assert (row["ratio_median"], row["ratio_low"], row["ratio_high"]) == (2.0, 2.0, 2.5)
    limits = row["limits"]
    assert isinstance(limits, dict)
    assert limits["machine_ms"] == 10.0, "250 MB at 25 GB/s"
    assert limits["matmul_only_share"] == 0.4, "8 ms of the 20 that the middle block's steps took"


def test_without_a_peer_there_is_no_ratio() -> None:
    by_system = {name: readings_of(400, 480) for name in ("kvrelay", "kvrelay_again")}
    row = row_of(DECODE, by_system, Work(1, 1, 1), LIMITS, products_ms=None)
    assert (row.peer, row.ratio, row.limit_tokens_per_s) == (None, None, None)
    assert row.as_json()["ratio_median"] is None


def test_the_tables_show_rates_parts_and_costs() -> None:
    text = io.StringIO()
    costs = [Cost(128, 1, 10.0), Cost(128, 8, 20.0), Cost(128, 64, None)]
    show(Console(width=80, file=text), [decode_row()], costs)
    words = " ".join(text.getvalue().replace("│", " ").split())
    assert "decode_b8 400 200 100 2.00 (2.00-2.50) 1.00 (1.00-1.20)" in words
    assert "decode_b8 20.00 10.00 50% 5.00 25% 0.00 0% 5.00 25%" in words
    assert "decode_b8 250 0.0 10.00 50% 8.00 40%" in words
    assert "128 10.0 20.0 - 10.00 2.50" in words
