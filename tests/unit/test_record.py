"""Records of an engine: they go the same way again, say where they do not, and harm nobody."""

from __future__ import annotations

import heapq
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.engine_world import World
from tests.sim.record_life import record_life

from kvrelay.shared.engine import engine as engine_module
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine import scheduler
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.record import writer as writer_module
from kvrelay.shared.engine.record.entry import Entry
from kvrelay.shared.engine.record.lines import Header, read_header
from kvrelay.shared.engine.record.recorded import RecordedEngine
from kvrelay.shared.engine.record.replay import RecordFile, Replay, ReplayFault, replay
from kvrelay.shared.engine.record.writer import RecordWriter
from kvrelay.shared.engine.state import EngineLimits, Leg
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.kv.pool import BlockPool
from kvrelay.shared.types import FinishReason, Incarnation, LegRef, LegSpec, SamplingParams
from kvrelay.shared.worker.config import WorkerConfig
from kvrelay.shared.worker.recording import recording

LIFE = Path(__file__).parent.parent / "data" / "engine_life.jsonl"
LIMITS = EngineLimits(4, 4, 8, 56, 1000, b"test")
PATH = "record.jsonl"


def header() -> Header:
    return Header(LIMITS, 14, "somebody", "0.0")


def serve(leg: str, prompt: list[int]) -> m.Serve:
    spec = LegSpec(leg, tuple(prompt), SamplingParams(max_tokens=20))
    return m.Serve("r", LegRef(leg, 0, 1), spec, handoff=False)


def state_of(engine: Engine) -> tuple[object, ...]:
    state = engine.state
    legs = [
        (leg.key, leg.phase, leg.known, leg.computed, leg.blocks) for leg in state.legs.values()
    ]
    return legs, state.pool.counts(), state.pool.holders(), state.preemptions, state.step


# ---- the same again ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_life_is_lived_again_to_the_same_state(seed: int, tmp_path: Path) -> None:
    engine = record_life(seed, 300, tmp_path / PATH)
    assert state_of(replay(tmp_path / PATH).engine) == state_of(engine)


def test_the_kept_record_of_preemptions_cancels_and_shared_blocks_goes_as_it_went() -> None:
    state = replay(LIFE).engine.state
    assert LIFE.read_text().count('\n["Cancel"') == 7
    assert (state.step, state.preemptions, state.cache_hit_tokens) == (42, 5, 229)
    assert (state.pool.evictions, len(state.legs)) == (48, 22)


def test_until_stops_before_that_call() -> None:
    replayed = replay(LIFE, until=142)
    legs = [leg.key for leg in replayed.engine.state.running]
    assert legs == ["leg11#0", "leg13#0"]
    plan, _ = replayed.engine.plan(8)
    assert plan is not None
    assert [row.key for row in plan.rows] == ["leg11#0", "leg13#0", "leg9#0"]


def test_what_a_recorded_engine_answers_is_what_it_answers_anyway() -> None:
    worlds = [World(random.Random(5)), World(random.Random(5))]
    noted: list[Entry] = []
    recorded = RecordedEngine(worlds[1].engine, noted.append)
    worlds[1].engine = recorded  # type: ignore[assignment]
    for world in worlds:
        for _ in range(300):
            world.act()
    assert worlds[0].ended == worlds[1].ended
    assert worlds[0].happened == worlds[1].happened
    assert len(noted) > 200


# ---- another way ------------------------------------------------------------------------------


def streams_backwards(patch: pytest.MonkeyPatch) -> None:
    share_out = scheduler.share_out

    def backwards(*args: object) -> object:
        rows, chunks, left = share_out(*args)  # type: ignore[arg-type]
        return rows[::-1], chunks, left

    patch.setattr(scheduler, "share_out", backwards)


def oldest_victim(patch: pytest.MonkeyPatch) -> None:
    def victim(running: list[Leg]) -> Leg:
        return min((leg for leg in running if not leg.handoff), key=lambda leg: leg.arrival)

    patch.setattr(scheduler, "victim", victim)


def newest_evicted(patch: pytest.MonkeyPatch) -> None:
    def evict(pool: BlockPool) -> None:
        block, _ = pool._idle.popitem(last=True)
        pool._index.remove(block)
        heapq.heappush(pool._free, block)

    patch.setattr(BlockPool, "_evict", evict)


def leak(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda pool, blocks: release(pool, blocks[1:]))


def no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "lookup_part", lambda pool, parent, tokens: (None, 0))


def other_finish(patch: pytest.MonkeyPatch) -> None:
    finish_reason = engine_module.finish_reason

    def stop(*args: object) -> FinishReason | None:
        return FinishReason.STOP if finish_reason(*args) else None  # type: ignore[arg-type]

    patch.setattr(engine_module, "finish_reason", stop)


def never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "finish_reason", lambda *_: None)


def raises(patch: pytest.MonkeyPatch) -> None:
    def preempt(*_: object) -> None:
        raise IndexError("no such leg")

    patch.setattr(scheduler, "preempt", preempt)


@pytest.mark.parametrize(
    ("fault", "number", "what"),
    [
        (streams_backwards, 142, "plan: 3 rows of 5 tokens as recorded, but other legs, or in"),
        (oldest_victim, 148, "plan: 2 rows of 2 tokens as recorded, but other legs, or in"),
        (newest_evicted, 40, "plan: 2 rows of 3 tokens as recorded, but in other blocks"),
        (no_copies, 40, "plan: recorded 2 rows of 3 tokens; now 2 rows of 4 tokens"),
        (leak, 15, "leaves a pool that breaks its law: a block has no live holder"),
        (other_finish, 23, "instructions: 1 PublishedOut, 1 TokenOut, 1 Ended as recorded, with"),
        (never_ends, 23, "instructions: recorded 1 PublishedOut, 1 TokenOut, 1 Ended; now 1 Publ"),
        (raises, 128, "raises IndexError: no such leg"),
    ],
)
def test_a_fault_in_the_engine_is_told_at_the_first_call_that_goes_another_way(
    fault: Callable[[pytest.MonkeyPatch], None],
    number: int,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(ReplayFault) as found:
        replay(LIFE)
    assert found.value.number == number
    assert str(found.value).startswith(f"call {number}: {what}")


def test_a_defect_that_ended_an_engine_is_met_again_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        raises(broken)
        with pytest.raises(IndexError):
            record_life(37, 330, tmp_path / PATH)
        with pytest.raises(ReplayFault, match=r"^call 128: raises .*leg, as it did"):
            replay(tmp_path / PATH)
    record = RecordFile(tmp_path / PATH)
    again = Replay(record.header)
    assert [turn.mended for turn in map(again.turn, record.lines())][-2:] == [
        "",
        "IndexError: no such leg",
    ]


# ---- files ------------------------------------------------------------------------------------


def test_a_record_that_was_cut_anywhere_is_replayed_up_to_the_cut(tmp_path: Path) -> None:
    whole = LIFE.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept, within in ((40, 0), (40, 1), (41, 9), (100, 20)):
        (tmp_path / PATH).write_bytes(b"".join(lines[:kept]) + lines[kept][:within])
        record = RecordFile(tmp_path / PATH)
        assert [line.number for line in record.lines()] == [*range(1, kept)]
        assert record.end == "cut off"


FIRST = LIFE.read_bytes().split(b"\n", 1)[0] + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: no JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xd8", "line 1: no JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b'{"a": 1}\n', "line 1: it is no record of kvrelay"),
        (b'{"kvrelay record": 2}\n', "line 1: it is a record of version 2; version 1 is read"),
        (b'{"kvrelay record": 1}\n', "line 1: its first line is broken: no 'limits'"),
        (
            FIRST.replace(b"shortest-uncached-first", b"magic"),
            "line 1: its first line is broken: no 'magic'",
        ),
        (
            FIRST.replace(b'"blocks":14', b'"blocks":0'),
            "line 1: its first line is broken: blocks is 0, not a number from 1 to 16777216",
        ),
        (FIRST + b"[]\n", "line 2: no recorded call: list index out of range"),
        (FIRST + b"half\nmore\n", "line 2: no JSON: Expecting value"),
        (FIRST + b'["fly",1,{}]\n', "line 2: no recorded call: 'fly' is no call of an engine"),
        (FIRST + b'["plan",-1,{}]\n', "line 2: no recorded call: the budget is -1, not a number"),
        (FIRST + b'["complete",[1.5],{}]\n', "line 2: no recorded call: 1.5 is no token"),
        (FIRST + b'["OwnerGone",{"who":"a"},{}]\n', "line 2: OwnerGone owner: field required"),
        (
            FIRST + b'["OwnerGone",{"owner":"a","when":1},{}]\n',
            "line 2: no recorded call: OwnerGone has no 'when' in this version of kvrelay",
        ),
    ],
)
def test_a_file_that_is_no_record_is_told_in_one_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / PATH).write_bytes(content)
    with pytest.raises(ConfigError) as said:
        replay(tmp_path / PATH)
    assert str(said.value).startswith(f"{tmp_path / PATH} {message}")
    assert "\n" not in str(said.value)


def test_a_record_that_ends_steps_it_never_planned_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / PATH).write_bytes(FIRST + b'["complete",[],{}]\n')
    with pytest.raises(ReplayFault, match=r"^call 1: ends a step, and none was planned$"):
        replay(tmp_path / PATH)


# ---- writing ----------------------------------------------------------------------------------


def test_the_writer_keeps_all_of_a_life_for_its_owner_alone(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / PATH, header(), 1 << 20)
    engine = RecordedEngine(Engine(LIMITS, 14), writer.note)
    engine.handle(serve("a", [1, 2, 3]))
    engine.plan(8)
    writer.close()
    record = RecordFile(tmp_path / PATH)
    assert read_header((tmp_path / PATH).read_bytes().split(b"\n")[0]) == header()
    assert [line.number for line in record.lines()] == [1, 2]
    assert record.end == "closed"
    assert stat.S_IMODE((tmp_path / PATH).stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=f"record: cannot write {tmp_path / PATH}: File exists"):
        RecordWriter(tmp_path / PATH, header(), 1 << 20)


def test_at_its_limit_a_record_ends_once_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordWriter(tmp_path / PATH, header(), 3000)
    engine = RecordedEngine(Engine(LIMITS, 14), writer.note)
    for at in range(20):
        engine.handle(serve(f"leg{at}", [at]))
    writer.close()
    record = RecordFile(tmp_path / PATH)
    kept = len(list(record.lines()))
    assert (kept, record.end) == (5, "limit of 3000 bytes")
    assert len(engine.state.legs) == 20
    assert [entry.getMessage() for entry in caplog.records] == [
        f"recording to {tmp_path / PATH} stopped: record_limit of 3000 bytes is reached"
    ]
    replay(tmp_path / PATH)


def test_a_disk_that_takes_no_more_ends_the_record_once_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(writer_module, "create", lambda path: os.fdopen(writing, "wb"))
    writer = RecordWriter(tmp_path / PATH, header(), 1 << 20)
    os.close(reading)
    engine = RecordedEngine(Engine(LIMITS, 14), writer.note)
    engine.handle(serve("a", [1]))
    writer.close()
    engine.handle(serve("b", [1]))
    assert len(engine.state.legs) == 2
    assert [entry.getMessage() for entry in caplog.records] == [
        f"recording to {tmp_path / PATH} stopped: Broken pipe"
    ]


def worker(**settings: object) -> WorkerConfig:
    return WorkerConfig.model_validate({"model": "m", **settings})


def test_without_a_folder_a_worker_runs_the_engine_itself() -> None:
    engine = Engine(LIMITS, 14)
    assert recording(worker(), "decode-0")(engine, Incarnation("ab12"))[0] is engine


def test_each_incarnation_of_a_worker_has_a_file_of_its_own(tmp_path: Path) -> None:
    record = recording(worker(record=str(tmp_path / "new")), "a/b")
    for incarnation in ("11112222333344", "aaaabbbbccccdd"):
        machine, close = record(Engine(LIMITS, 14), Incarnation(incarnation))
        machine.handle(serve("a", [1]))
        close()
    names = sorted(path.name.split("-", 2)[2] for path in (tmp_path / "new").iterdir())
    assert names == ["a_b-11112222.jsonl", "a_b-aaaabbbb.jsonl"]
    for path in (tmp_path / "new").iterdir():
        assert len(replay(path).engine.state.legs) == 1


def test_a_folder_that_cannot_be_is_told_before_a_worker_loads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"record is '.*/file/new': Not a directory"):
        recording(worker(record=str(tmp_path / "file" / "new")), "decode-0")
