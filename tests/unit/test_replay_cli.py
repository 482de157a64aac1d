"""`kvrelay replay`: what it shows, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.services import cli
from kvrelay.shared.kv.pool import BlockPool

DATA = Path(__file__).parent.parent / "data"
LIFE = str(DATA / "engine_life.jsonl")


def replayed(*arguments: str) -> tuple[int, list[str]]:
    outcome = CliRunner().invoke(cli.app, ["replay", LIFE, *arguments], catch_exceptions=False)
    return outcome.exit_code, outcome.output.splitlines()


def test_a_line_for_each_step_says_who_ran_and_what_is_left() -> None:
    code, lines = replayed()
    assert code == 0
    assert lines[0].endswith(": 14 blocks of 4 tokens, 4 legs, 8 tokens a step")
    assert lines[12] == (
        "call 142 step 12: 1 stream, leg13#0 [6, 7), leg9#0 [15, 18): 5 tokens "
        "| blocks 2 free, 0 cached, 12 used | 3 running, 7 waiting, 5 reserving | copied 1"
    )
    assert len(lines) == 1 + 42 + 1
    assert lines[-1] == "225 calls, 42 steps: all as recorded; the record's end: closed"


def test_verify_says_no_more_than_the_result() -> None:
    assert [len(lines) for _, lines in [replayed("--verify")]] == [2]


def test_until_shows_every_leg_before_that_call() -> None:
    code, lines = replayed("--verify", "--until", "60")
    assert code == 0
    assert lines[1:] == [
        "before call 60: blocks 0 free, 2 cached, 0 used, 12 quarantined "
        "| 0 running, 1 waiting, 1 reserving, 2 receiving",
        "  leg5#0 receiving: 0/18, blocks 2 3 4 7 8",
        "  leg8#0 reserving: 0/27, blocks none",
        "  leg9#0 waiting: 0/18, blocks none",
        "  leg10#0 receiving: 0/25, blocks 5 6 9 10 11 12 13",
        "59 calls, 4 steps: all as recorded",
    ]


def test_json_is_an_object_a_line() -> None:
    code, lines = replayed("--json", "--until", "142")
    said = [json.loads(line) for line in lines]
    assert code == 0
    assert said[0]["blocks"] == 14
    assert (said[-1]["ok"], said[-1]["calls"], said[-1]["until"]) == (True, 141, 142)
    assert said[-2]["rows"] == [["leg11#0", 16, 1], ["leg13#0", 0, 6]]


def test_another_way_is_one_line_the_legs_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "lookup_part", lambda pool, parent, tokens: (None, 0))
    code, lines = replayed("--verify")
    assert code == 1
    assert lines[1] == "call 40: plan: recorded 2 rows of 3 tokens; now 2 rows of 4 tokens"
    assert all(line.startswith("  leg") for line in lines[2:])
    code, lines = replayed("--verify", "--json")
    found = json.loads(lines[-1])
    assert (code, found["ok"], found["call"]) == (1, False, 40)


def test_without_checks_a_leak_is_found_where_it_changes_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: release(pool, blocks[1:]))
    assert replayed("--verify")[1][1].startswith("call 15: leaves a pool that breaks its law")
    code, lines = replayed("--verify", "--no-check")
    assert code == 1
    assert lines[1] == "call 22: instructions: 1 Expect, 1 Room as recorded, with other content"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("/no/such/file", "error: /no/such/file: No such file or directory"),
        ("/", "error: /: Is a directory"),
        (
            "README.md",
            "error: README.md line 1: no JSON: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
def test_what_is_no_record_is_one_line_and_exit_code_2(
    file: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvrelay", "replay", file])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(message)
