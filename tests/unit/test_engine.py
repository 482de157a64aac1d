"""The engine's moves, fed event by event with a runner that is a function of tokens."""

from __future__ import annotations

import pytest

from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.plan import Plan, StepResult
from kvrelay.shared.engine.push import cut_runs
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.lifecycle import QUIET_MS, Phase
from kvrelay.shared.types import EndReason, FinishReason, LegRef, LegSpec, SamplingParams

BLOCK = 4


def engine(blocks: int = 16, **changes: int) -> Engine:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "max_model_len": min(blocks * BLOCK, 64),
        **changes,
    }
    limits = EngineLimits(block_size=BLOCK, vocab_size=1000, salt=b"test", **settings)
    return Engine(limits, blocks)


def spec(leg: str, prompt: int, **sampling: int) -> LegSpec:
    params = SamplingParams(temperature=0, **{"max_tokens": 3, **sampling})
    return LegSpec(leg, tuple(range(1, prompt + 1)), params, eos_token_ids=(0,))


def ref(leg: str, attempt: int = 0) -> LegRef:
    return LegRef(leg, attempt, hash((leg, attempt)) & 0xFFFF)


def step(engine: Engine, budget: int = 8, token: int = 7) -> tuple[Plan | None, list[object]]:
    plan, out = engine.plan(budget)
    said: list[object] = list(out)
    if plan is not None:
        sampled = {row.key: token for row in plan.rows if row.sample}
        said += engine.complete(plan, StepResult(plan.step, sampled))
    engine.state.check()
    return plan, said


def kinds(out: list[object]) -> list[str]:
    return [type(item).__name__ for item in out]


def test_an_unsplit_leg_is_chunked_then_decoded_to_its_length() -> None:
    e = engine()
    assert e.handle(m.Serve("r", ref("a"), spec("a", 10), handoff=False)) == []
    plan, out = step(e)
    assert plan is not None and [len(row.tokens) for row in plan.rows] == [8]
    assert out == [m.Started("r", ref("a"), 0)]
    _, out = step(e)
    assert out == [m.TokenOut("r", ref("a"), 0, 7, None)]
    step(e)
    _, out = step(e)
    assert out == [
        m.TokenOut("r", ref("a"), 2, 7, FinishReason.LENGTH),
        m.Ended("r", ref("a"), EndReason.FINISHED),
    ]
    counts = e.state.pool.counts()
    assert (counts.in_use, counts.free + counts.cached_idle) == (0, 16)
    assert step(e) == (None, [])


def test_prefill_asks_for_room_before_its_first_chunk_and_pushes_behind_each() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 10), handoff=True))
    plan, out = step(e)
    assert plan is None and out == [m.NeedRoom("r", ref("a"))]
    assert e.state.pool.counts().in_use == 0, "nothing is held while a leg only queues"
    e.handle(m.RoomGranted(ref("a"), 0, (1, 2)))
    _, out = step(e)
    assert out[1] == m.Push(ref("a"), 0, 0, 8, (0, 1), (1, 1), last=False)
    _, out = step(e)
    assert out == [
        m.TokenOut("r", ref("a"), 0, 7, None),
        m.Push(ref("a"), 1, 8, 10, (2,), (1,), last=True, token=7, index=0),
    ]
    assert e.handle(m.PushDone(ref("a"))) == []
    assert e.handle(m.Published(ref("a"))) == [m.Abandon(ref("a"))]
    assert e.handle(m.PushDone(ref("a"), "abandoned")) == [
        m.Ended("r", ref("a"), EndReason.FINISHED)
    ]
    assert e.state.pool.counts().cached_idle == 3, "the prompt stays as cache"


def test_decode_reads_nothing_before_every_chunk_arrived() -> None:
    e = engine()
    out = e.handle(m.Reserve("r", ref("a"), spec("a", 10), "P"))
    assert out == [m.Expect(ref("a"), "P", 0, 10, 4, (0, 1, 2)), m.Room("r", ref("a"), 0, (3,))]
    assert e.state.pool.counts().quarantined == 3
    e.handle(m.ChunkArrived(ref("a"), 0, 8, last=False))
    assert step(e) == (None, [])
    out = e.handle(m.ChunkArrived(ref("a"), 8, 10, last=True, token=5))
    assert out == [m.PublishedOut("r", ref("a"), 10), m.TokenOut("r", ref("a"), 0, 5, None)]
    assert e.state.pool.counts().quarantined == 0
    plan, out = step(e)
    assert plan is not None and (plan.rows[0].start, list(plan.rows[0].tokens)) == (10, [5])
    assert out == [m.TokenOut("r", ref("a"), 1, 7, None)]


def test_a_hole_between_chunks_ends_the_attempt_without_a_token() -> None:
    e = engine()
    e.handle(m.Reserve("r", ref("a"), spec("a", 10), "P"))
    assert e.handle(m.ChunkArrived(ref("a"), 4, 8, last=False)) == [m.Forget(ref("a"))]
    assert e.state.pool.counts().quarantined == 3, "still quarantined: a write may be in flight"
    (ended,) = e.handle(m.Forgotten(ref("a")))
    assert isinstance(ended, m.Ended) and ended.retryable
    assert e.state.pool.counts().free == 16


def test_a_retry_has_the_room_of_the_attempt_that_lost_its_prefill_worker() -> None:
    """Those who waited behind it still do, however much smaller they are."""
    e = engine(blocks=4, max_model_len=16)
    e.handle(m.Reserve("r", ref("a"), spec("a", 12), "P"))
    for leg in ("b", "c"):
        assert e.handle(m.Reserve("r", ref(leg), spec(leg, 8), "P")) == []
    assert e.handle(m.RelayFailed(ref("a"), "P is gone")) == [m.Forget(ref("a"))]
    assert e.handle(m.Reserve("r", ref("a", 1), spec("a", 12), "Q")) == [], "P may still write"
    out = e.handle(m.Forgotten(ref("a")))
    assert kinds(out) == ["Ended", "Expect", "Room"]
    assert [it.ref for it in out if isinstance(it, m.Room)] == [ref("a", 1)]
    e.handle(m.Cancel(ref("a", 1)))
    out = e.handle(m.Forgotten(ref("a", 1)))
    assert [it.ref for it in out if isinstance(it, m.Room)] == [ref("b")]
    e.state.check()


def test_a_retry_is_computed_before_those_who_come_for_the_first_time() -> None:
    e = engine(blocks=64)
    for leg in ("a", "b"):
        e.handle(m.Serve("r", ref(leg), spec(leg, 8), handoff=False))
    e.handle(m.Serve("r", ref("c", 1), spec("c", 8), handoff=False))
    plan, _ = step(e, budget=8)
    assert plan is not None and [row.key for row in plan.rows] == [e.state.running[0].key]
    assert e.state.running[0].ref == ref("c", 1)


def test_cancel_frees_in_every_phase() -> None:
    waiting = engine()
    waiting.handle(m.Serve("r", ref("a"), spec("a", 10), handoff=True))
    assert kinds(waiting.handle(m.Cancel(ref("a")))) == ["Ended"]

    asking = engine()
    asking.handle(m.Serve("r", ref("a"), spec("a", 10), handoff=True))
    step(asking)
    assert kinds(asking.handle(m.Cancel(ref("a")))) == ["Ended"]
    assert asking.handle(m.RoomGranted(ref("a"), 0, (3,))) == []

    sending = engine()
    sending.handle(m.Serve("r", ref("a"), spec("a", 10), handoff=True))
    step(sending)
    sending.handle(m.RoomGranted(ref("a"), 0, (3,)))
    step(sending)
    assert kinds(sending.handle(m.Cancel(ref("a")))) == ["Abandon"]
    assert sending.state.pool.counts().in_use == 3, "a chunk is still being read"
    assert sending.handle(m.Cancel(ref("a"))) == []
    assert kinds(sending.handle(m.PushDone(ref("a")))) == ["Ended"]

    receiving = engine()
    receiving.handle(m.Reserve("r", ref("a"), spec("a", 10), "P"))
    assert kinds(receiving.handle(m.Cancel(ref("a")))) == ["Forget"]
    assert kinds(receiving.handle(m.Forgotten(ref("a")))) == ["Ended"]

    decoding = engine()
    decoding.handle(m.Serve("r", ref("a"), spec("a", 3, max_tokens=9), handoff=False))
    step(decoding)
    assert kinds(decoding.handle(m.OwnerGone("r"))) == ["Ended"]

    for e in (waiting, asking, sending, receiving, decoding):
        e.state.check()
        counts = e.state.pool.counts()
        assert counts.in_use == counts.quarantined == 0 and e.state.legs == {}


def test_one_token_is_always_computed_after_a_full_prefix_hit() -> None:
    for prompt in (7, 8, 9):
        e = engine()
        for i in range(3):
            e.handle(m.Serve("r", ref(f"{i}"), spec(f"{i}", prompt, max_tokens=1), handoff=False))
            while step(e, budget=16)[0] is not None:
                pass
        assert e.state.cache_hit_tokens == 2 * (prompt - 1)


def test_the_newest_leg_yields_its_memory_and_continues_where_it_was() -> None:
    e = engine(blocks=6, max_model_len=24)
    e.handle(m.Serve("r", ref("old"), spec("old", 8, max_tokens=12), handoff=False))
    e.handle(
        m.Serve(
            "r",
            ref("new"),
            LegSpec("new", tuple(range(50, 58)), SamplingParams(max_tokens=12)),
            handoff=False,
        )
    )
    tokens: dict[str, list[int]] = {"old": [], "new": []}
    for _ in range(60):
        _, out = step(e, budget=16)
        for item in out:
            if isinstance(item, m.TokenOut):
                tokens[item.ref.leg].append(item.index)
    assert tokens == {"old": list(range(12)), "new": list(range(12))}
    assert e.state.preemptions > 0 and e.state.legs == {}


def test_eos_and_stop_ids_wait_for_min_tokens_and_then_end_the_leg() -> None:
    e = engine()
    params = {"max_tokens": 9, "min_tokens": 2}
    e.handle(m.Serve("r", ref("a"), spec("a", 3, **params), handoff=False))
    plan, _ = e.plan(8)
    assert plan is not None and plan.rows[0].banned == (0,)
    e.complete(plan, StepResult(1, {plan.rows[0].key: 7}))
    step(e)
    plan, _ = e.plan(8)
    assert plan is not None and plan.rows[0].banned == ()
    out = e.complete(plan, StepResult(3, {plan.rows[0].key: 0}))
    assert kinds(list(out)) == ["TokenOut", "Ended"]


def test_what_can_never_fit_is_refused_at_once_and_others_are_served() -> None:
    e = engine(blocks=4, max_model_len=64)
    out = e.handle(m.Serve("r", ref("big"), spec("big", 20), handoff=False))
    assert kinds(list(out)) == ["Ended"]
    e.handle(m.Serve("r", ref("bad"), LegSpec("bad", (5, -1), SamplingParams()), handoff=False))
    e.handle(m.Serve("r", ref("ok"), spec("ok", 5, max_tokens=1), handoff=False))
    _, out = step(e)
    assert kinds(out) == ["Started", "TokenOut", "Ended"]


def test_a_failed_step_ends_its_legs_and_no_others() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 3), handoff=False))
    plan, _ = e.plan(8)
    assert plan is not None
    e.handle(m.Serve("r", ref("b"), spec("b", 4), handoff=False))
    out = e.fail_step(plan, "broken")
    assert out == [m.Ended("r", ref("a"), EndReason.FAILED, "broken")]
    assert kinds(step(e)[1]) == ["Started", "TokenOut"]


def test_runs_are_cut_where_a_chunk_begins_and_ends() -> None:
    assert cut_runs((3, 2, 4), 0, 9) == (3, 2, 4)
    assert cut_runs((3, 2, 4), 2, 4) == (1, 2, 1)
    assert cut_runs((3, 2, 4), 5, 4) == (4,)


def test_a_row_without_a_token_ends_its_leg_and_no_other() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 3), handoff=False))
    e.handle(m.Serve("r", ref("b"), spec("b", 4), handoff=False))
    plan, _ = e.plan(8)
    assert plan is not None
    bad, good = (row.key for row in plan.rows)
    out = e.complete(plan, StepResult(1, {good: 7}, failed={bad: "not a number"}))
    assert out == [
        m.Ended("r", ref("a"), EndReason.FAILED, "not a number"),
        m.TokenOut("r", ref("b"), 0, 7, None),
    ]


def looked(e: Engine, seconds: int, each_s: int = 5) -> list[object]:
    out: list[object] = []
    for _ in range(seconds // each_s):
        out += e.handle(m.Look(each_s * 1000))
        e.state.check()
    return out


def waits_for_others(phase: Phase) -> Engine:
    """An engine with one leg in this phase."""
    e = engine(4) if phase is Phase.RESERVING else engine()
    if phase is Phase.RESERVING:
        e.handle(m.Serve("r", ref("b"), spec("b", 12, max_tokens=3), handoff=False))
        step(e)
        step(e)
    if phase in (Phase.RESERVING, Phase.RECEIVING):
        e.handle(m.Reserve("r", ref("a"), spec("a", 10), "P"))
    else:
        e.handle(m.Serve("r", ref("a"), spec("a", 6), handoff=True))
        step(e)
    if phase is Phase.HANDING_OFF:
        e.handle(m.RoomGranted(ref("a"), 0, (2,)))
        step(e)
        e.handle(m.PushDone(ref("a")))
    assert e.state.legs[ref("a")].phase is phase
    return e


@pytest.mark.parametrize("phase", QUIET_MS)
def test_a_leg_of_which_nothing_is_heard_ends_by_the_workers_own_deadline(phase: Phase) -> None:
    e = waits_for_others(phase)
    assert looked(e, QUIET_MS[phase] // 1000) == []
    out = looked(e, 5)
    if phase is Phase.RECEIVING:
        assert kinds(out) == ["Forget"]
        assert e.state.pool.counts().quarantined == 3, "its writer may still write"
        out = e.handle(m.Forgotten(ref("a")))
    (ended,) = out
    assert isinstance(ended, m.Ended) and ended.retryable and "nothing was heard" in ended.message
    assert (
        ref("a") not in e.state.legs and not e.state.asking_tokens and e.state.granted_tokens == 0
    )


def test_what_is_heard_begins_the_workers_deadline_anew() -> None:
    e = waits_for_others(Phase.RECEIVING)
    assert looked(e, 145) == []
    e.handle(m.ChunkArrived(ref("a"), 0, 8, False))
    assert looked(e, 150) == []
    assert kinds(looked(e, 5)) == ["Forget"]


def test_a_leg_that_waits_for_its_own_engine_has_no_such_deadline() -> None:
    e = engine()
    e.handle(m.Serve("r", ref("a"), spec("a", 6), handoff=False))
    step(e)
    e.handle(m.Serve("r", ref("b"), spec("b", 6), handoff=True))
    assert looked(e, 1000) == []
    assert len(e.state.legs) == 2


def test_a_decode_worker_without_room_does_not_keep_the_legs_for_others_waiting() -> None:
    """All together have no more granted than is computed soon, and no leg asks twice."""
    e = engine(64, max_num_seqs=4)
    legs = [f"{reader}{n}" for reader in ("full", "free") for n in range(6)]
    for leg in legs:
        e.handle(m.Serve("r", ref(leg), spec(leg, 6), True, leg[:-1]))
    asked = [it.ref.leg for it in e.plan(8)[1] if isinstance(it, m.NeedRoom)]
    window = 2 * 8
    assert asked == ["full0", "full1", "full2", "free0", "free1", "free2"]
    for leg in asked[3:]:
        e.handle(m.RoomGranted(ref(leg), 0, (2,)))
        e.state.check()
    assert e.state.granted_tokens >= window
    _, out = step(e)
    assert all(it.ref.leg.startswith("free") for it in out if isinstance(it, m.NeedRoom))
    assert e.state.granted_tokens < window + 6
    assert e.state.asking_tokens["full"] < window + 6
    for leg in legs:
        e.handle(m.Cancel(ref(leg)))
    for leg in legs:
        while ref(leg) in e.state.legs:
            e.handle(m.PushDone(ref(leg)))
    e.state.check()
    assert not e.state.asking_tokens and e.state.granted_tokens == 0
