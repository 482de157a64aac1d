"""A chaos plan: what it may say, and that a seed says the same again."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.sim.virtual import run_virtual

from kvrelay.services.chaos.client import Answer
from kvrelay.services.chaos.load import Question, questions, wrong_token
from kvrelay.services.chaos.report import spread
from kvrelay.services.router.faulty import FaultyRoster, command_step
from kvrelay.shared.chaos.channel import FaultyChannel
from kvrelay.shared.chaos.decide import Chaos, fraction, open_chaos
from kvrelay.shared.chaos.plan import Action, ChaosPlan, Fault, Step, load_plan, parse_plan
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.transfer.faults import fate_of
from kvrelay.shared.worker.faulty import event_step

EXAMPLES = sorted((Path(__file__).parents[2] / "loadtests" / "chaos").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_plans(path: Path) -> None:
    plan = load_plan(path)
    assert plan.rules or plan.processes or not plan.expect.retries


def test_all_examples_are_found() -> None:
    assert [path.stem for path in EXAMPLES] == ["calm", "kills", "short", "soak", "transfer"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [", "p.yaml is not valid YAML: "),
        ("- 1", "p.yaml must hold a mapping, got list"),
        ("sed: 1", "sed is 1: extra inputs are not permitted"),
        (
            "rules: [{step: token, fault: delay, rate: 2}]",
            "rules.0.rate is 2: input should be less",
        ),
        ("rules: [{step: tokn, fault: delay, rate: 1}]", "rules.0.step is 'tokn': input should be"),
        ("rules: [{step: token, fault: delay}]", "exactly one of rate and nth is needed"),
        (
            "rules: [{step: token, fault: flip, nth: 1}]",
            "flip is for chunk.body and chunk.header, not token",
        ),
        ("processes: [{action: kill, part: a}]", "exactly one of at_s, at_done, every_s and"),
        (
            "processes: [{action: [], part: a, every_s: 1}]",
            "processes.0.action is []: value should have",
        ),
        ("expect: {cancels: 1.5}", "expect.cancels is 1.5: input should be less than or equal"),
    ],
)
def test_a_mistake_is_one_line_with_field_value_and_limit(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_plan(text, "p.yaml")
    assert str(error.value).startswith("chaos: ") and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chaos: cannot read .*none.yaml: No such file"):
        load_plan(tmp_path / "none.yaml")


def test_one_action_and_several_are_both_understood() -> None:
    plan = parse_plan(
        "processes: [{action: kill, part: worker, every_s: 1},"
        "{action: [term, stop], part: worker, at_s: [1]}]",
        "p",
    )
    assert [a.action for a in plan.processes] == [(Action.KILL,), (Action.TERM, Action.STOP)]


def plan_of(*rules: dict[str, object], seed: int = 7) -> ChaosPlan:
    return ChaosPlan.model_validate({"seed": seed, "rules": rules})


BODY_FLIPS = {"step": "chunk.body", "fault": "flip", "rate": 0.1}


def hits(chaos: Chaos, step: Step, count: int = 1000) -> list[object]:
    return [chaos.at(step) for _ in range(count)]


def test_the_same_seed_and_part_decide_the_same_and_others_differ() -> None:
    plan = plan_of(BODY_FLIPS)
    first = hits(Chaos(plan, "prefill-0", "prefill"), Step.CHUNK_BODY)
    assert first == hits(Chaos(plan, "prefill-0", "prefill"), Step.CHUNK_BODY)
    assert first != hits(Chaos(plan, "prefill-1", "prefill"), Step.CHUNK_BODY)
    other = plan_of(BODY_FLIPS, seed=8)
    assert first != hits(Chaos(other, "prefill-0", "prefill"), Step.CHUNK_BODY)
    assert 70 < sum(hit is not None for hit in first) < 130, "a tenth, roughly"


def test_one_rule_does_not_move_anothers_faults() -> None:
    alone = Chaos(plan_of(BODY_FLIPS), "p", "prefill")
    beside = Chaos(
        plan_of(BODY_FLIPS, {"step": "token", "fault": "delay", "rate": 0.5}), "p", "prefill"
    )
    expected = hits(alone, Step.CHUNK_BODY)
    got = []
    for _ in range(1000):
        beside.at(Step.TOKEN)
        got.append(beside.at(Step.CHUNK_BODY))
    assert got == expected


def test_nth_limit_and_place_are_kept() -> None:
    rule = {"step": "ended", "fault": "delay", "nth": 3, "limit": 2, "at": "decode"}
    chaos = Chaos(plan_of(rule), "decode-0", "decode")
    struck = [n for n, hit in enumerate(hits(chaos, Step.ENDED, 12), 1) if hit is not None]
    assert struck == [3, 6]
    elsewhere = Chaos(plan_of(rule), "prefill-0", "prefill")
    assert set(hits(elsewhere, Step.ENDED, 12)) == {None}
    named = Chaos(plan_of({**rule, "at": "decode-1"}), "decode-0", "decode")
    assert set(hits(named, Step.ENDED, 12)) == {None}


def test_each_fault_is_counted_and_a_process_fault_strikes() -> None:
    struck: list[tuple[Fault, float]] = []
    counted: Counter[tuple[Step, Fault]] = Counter()

    def injected(step: Step, fault: Fault) -> None:
        counted[step, fault] += 1

    rule = {"step": "reserve", "fault": "stop", "nth": 2, "delay_s": 3}
    chaos = Chaos(
        plan_of(rule), "router", "router", injected, lambda *strike: struck.append(strike)
    )
    assert set(hits(chaos, Step.RESERVE, 4)) == {None}
    assert struck == [(Fault.STOP, 3.0)] * 2
    assert counted == {(Step.RESERVE, Fault.STOP): 2}


def test_without_a_plan_there_is_no_chaos(caplog: pytest.LogCaptureFixture) -> None:
    assert open_chaos("", "router", "router") is None
    assert caplog.text == ""


def test_with_one_it_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    assert open_chaos(str(EXAMPLES[0]), "decode-0", "decode") is not None
    assert "CHAOS: this decode injects faults on purpose" in caplog.text


@pytest.mark.parametrize("fault", [f for f in Fault if f not in (Fault.KILL, Fault.TERM)])
def test_damage_stays_inside_the_message(fault: Fault) -> None:
    chaos = Chaos(
        plan_of({"step": "chunk.body", "fault": fault, "nth": 1}), "p", "p", strike=lambda *_: None
    )
    for size in (0, 1, 256):
        hit = chaos.at(Step.CHUNK_BODY)
        if hit is not None:
            fate = fate_of(hit, size)
            assert fate.flip_bit is None or fate.flip_bit < size * 8
            assert fate.keep_bytes is None or fate.keep_bytes < size


def test_every_message_of_the_protocol_has_a_step() -> None:
    commands = {kind.name for kind in pb.Command.DESCRIPTOR.oneofs_by_name["kind"].fields}
    events = {kind.name for kind in pb.Event.DESCRIPTOR.oneofs_by_name["kind"].fields}
    for kind in commands - {"meet", "gone"}:  # about no request, and told past the roster
        command = pb.Command()
        getattr(command, kind).SetInParent()
        assert command_step(command) is not None, kind
    for kind in events:
        event = pb.Event()
        getattr(event, kind).SetInParent()
        assert event_step(event) is not None, kind


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("drop", [1, 3, 4]),
        ("duplicate", [1, 2, 2, 3, 4]),
        ("delay", [1, 2, 3, 4]),
        ("reorder", [1, 3, 2, 4]),
    ],
)
def test_a_channel_does_what_the_plan_says(fault: str, expected: list[int]) -> None:
    async def scene() -> list[int]:
        got: list[int] = []
        rule = {"step": "token", "fault": fault, "nth": 2, "limit": 1, "delay_s": 5}
        chaos = Chaos(plan_of(rule), "p", "p")
        channel = FaultyChannel[int](chaos, lambda message: Step.TOKEN, got.append)
        for number in (1, 2, 3, 4):
            channel.put(number)
        await asyncio.sleep(6)
        return got

    assert run_virtual(scene) == expected


def test_what_nothing_overtakes_comes_all_the_same() -> None:
    async def scene() -> tuple[list[int], list[int]]:
        got: list[int] = []
        rule = {"step": "token", "fault": "reorder", "nth": 1, "delay_s": 2}
        channel = FaultyChannel[int](
            Chaos(plan_of(rule), "p", "p"), lambda m: Step.TOKEN, got.append
        )
        channel.put(1)
        at_once = [*got]
        await asyncio.sleep(3)
        return at_once, got

    assert run_virtual(scene) == ([], [1])


class Roster:
    """One worker that is there, and nobody else."""

    def __init__(self) -> None:
        self.got: list[pb.Command] = []
        self.open = True

    def send(self, command: pb.Command) -> None:
        self.got.append(command)

    def link(self, incarnation: str) -> Roster | None:
        return self if incarnation == "here" else None

    def live(self) -> list[object]:
        return []

    def look(self) -> None: ...

    async def wait_change(self) -> None: ...


def test_a_faulty_roster_counts_over_all_commands_of_a_stream() -> None:
    roster = Roster()
    chaos = Chaos(plan_of({"step": "cancel", "fault": "drop", "nth": 2}), "router", "router")
    faulty = FaultyRoster(roster, chaos)  # type: ignore[arg-type]
    assert faulty.link("gone") is None
    for number in range(4):
        link = faulty.link("here")
        assert link is not None and link.open
        link.send(pb.Command(cancel=pb.Ref(attempt=number)))
    assert [command.cancel.attempt for command in roster.got] == [0, 2]


def test_questions_repeat_with_their_seed() -> None:
    assert questions("m", 3, 10) == questions("m", 3, 10) != questions("m", 4, 10)


def test_a_wrong_token_is_found_in_whole_answers_and_in_halves() -> None:
    question = Question({"n": 1})
    right = Answer(texts={0: "abc"}, finishes={0: ["length"]}, tokens=3)
    assert not wrong_token(question, Answer(texts={0: "ab"}, left=True), right)
    assert not wrong_token(question, right, right)
    assert wrong_token(question, Answer(texts={0: "ax"}, left=True), right)
    assert wrong_token(question, Answer(texts={0: "ab"}, finishes={0: ["length"]}), right)
    assert wrong_token(question, Answer(texts={0: "abc"}, finishes={0: ["stop"]}), right)
    assert wrong_token(
        question, Answer(texts={0: "abc"}, finishes={0: ["length"]}, tokens=4), right
    )


def test_fractions_are_spread_and_figures_are_ordered() -> None:
    drawn = [fraction("x", number) for number in range(1000)]
    assert 0.45 < sum(drawn) / 1000 < 0.55 and min(drawn) >= 0 and max(drawn) < 1
    assert spread([3.0, 1.0, 2.0]) == {"count": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}
    assert spread([]) == {"count": 0}
