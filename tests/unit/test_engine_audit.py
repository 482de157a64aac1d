"""What an engine says of itself when it is asked, and that it sees what is wrong with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.unit.test_engine import engine, ref, spec, step

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import StepResult
from kvrelay.shared.engine.record.entry import Entry, Handle
from kvrelay.shared.engine.record.lines import Line, entry_line, read_line
from kvrelay.shared.kv.pool import PoolCounts
from kvrelay.shared.lifecycle import Phase
from kvrelay.shared.worker import audit
from kvrelay.shared.worker.audit import Auditor


def ask(e: Engine, number: int = 1) -> m.Audited:
    [answer] = e.handle(m.Audit(number))
    assert isinstance(answer, m.Audited) and answer.number == number
    return answer


def test_an_engine_at_rest_holds_nothing() -> None:
    assert ask(engine()) == m.Audited(1, (), PoolCounts(16, 16, 0, 0, 0), 0, 0, 0, 0, "", "")


def test_every_leg_is_told_with_its_owner_its_phase_and_its_blocks() -> None:
    e = engine()
    e.handle(m.Serve("one/0", ref("a"), spec("a", 8), handoff=True))
    other = replace(spec("b", 9), prompt=tuple(range(101, 110)))
    e.handle(m.Reserve("two/3", ref("b"), other, writer="w"))
    step(e)
    e.handle(m.RoomGranted(ref("a"), 0, (2,)))
    step(e)
    answer = ask(e)
    assert answer.legs == (
        m.AuditedLeg(ref("a"), "one/0", Phase.HANDING_OFF, 2, 1),
        m.AuditedLeg(ref("b"), "two/3", Phase.RECEIVING, 3, 0),
    )
    assert (answer.pool.in_use, answer.pool.quarantined, answer.holds) == (2, 3, 5)
    assert (answer.waiting, answer.running, answer.problem) == (0, 1, "")
    digests = {digest.hex() for digest in e.state.pool.digests()}
    assert len(digests) == 2
    assert {answer.digests[i : i + 32] for i in range(0, len(answer.digests), 32)} == digests


def test_a_leg_has_ended_only_when_its_quarantined_blocks_are_free() -> None:
    e = engine()
    e.handle(m.Reserve("r", ref("b"), spec("b", 9), writer="w"))
    assert e.handle(m.Cancel(ref("b"))) == [m.Forget(ref("b"))]
    assert [(leg.phase, leg.blocks) for leg in ask(e).legs] == [(Phase.DRAINING, 3)]
    [ended] = e.handle(m.Forgotten(ref("b")))
    assert isinstance(ended, m.Ended)
    assert ask(e).pool.free == 16


def test_a_leg_has_ended_only_when_the_step_that_writes_for_it_has() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 5), handoff=False))
    plan, _ = e.plan(8)
    assert plan is not None
    assert e.handle(m.Cancel(ref("a"))) == []
    assert ask(e).pool.in_use == 2
    [ended] = e.complete(plan, StepResult(plan.step, {}))
    assert isinstance(ended, m.Ended)
    assert ask(e).pool.in_use == 0


def test_a_block_that_nobody_holds_is_told() -> None:
    e = engine()
    e.state.pool.allocate(1)
    answer = ask(e)
    assert answer.problem == "a block has no live holder, or one that lets it go"
    assert (answer.holds, answer.pool.in_use, answer.legs) == (1, 1, ())


def test_a_record_has_the_question_and_the_answer() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 8), handoff=False))
    step(e)
    out = e.handle(m.Audit(3))
    line = read_line(1, entry_line(Entry(Handle(m.Audit(3)), out=out)))
    assert isinstance(line, Line)
    assert line.asked == Handle(m.Audit(3))
    assert line.outcome.said == {"Audited": 1}


async def test_an_engine_that_makes_no_turn_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "ENGINE_S", 0.01)
    asked: list[m.Audit] = []
    auditor = Auditor(asked.append)
    with pytest.raises(TimeoutError):
        await auditor.ask()
    late = engine().handle(asked[0])
    assert isinstance(late[0], m.Audited)
    auditor.answered(late[0])  # nobody waits for it any more
    question = asyncio.ensure_future(auditor.ask())
    await asyncio.sleep(0)
    [answer] = engine().handle(asked[1])
    assert isinstance(answer, m.Audited)
    auditor.answered(answer)
    assert await question is answer
