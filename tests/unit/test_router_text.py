"""The text machine: the same text whatever the cut, nothing shown too early, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.services.router.text import LegText

HIDDEN = -1


def run(
    pieces: Sequence[bytes],
    stop: Sequence[str] = (),
    unsearched: int = 0,
    include_stop: bool = False,
) -> list[str]:
    """Each delta, with what `finish` gives at the end. Token i is pieces[i]."""
    machine = LegText(lambda token: pieces[token], {HIDDEN}, stop, unsearched, include_stop)
    deltas = [machine.feed(token) for token in range(len(pieces))]
    return [*deltas, machine.finish()]


def cut(text: str, stop: Sequence[str], include_stop: bool = False) -> str:
    """The definition: read character by character, end at the first moment a stop is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: end if include_stop else min(starts)]
    return text


@st.composite
def pieces(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


FAMILY = "👨‍👩‍👧"  # three people, joined
FLAG, THUMB, HEART = "🇩🇪", "👍🏽", "❤️"  # pairs, a skin tone, a variation selector
COMBINED = "e\u0301o\u0308\u0323"  # marks behind their letters
MIXED = f"日本語{FAMILY}{COMBINED} {FLAG}{THUMB}한{HEART}\u2028é"

few = st.text("abé🙂", max_size=24)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3)


@given(pieces(few.map(str.encode)), stops)
def test_any_cut_into_tokens_gives_the_text_up_to_the_first_complete_stop(
    tokens: list[bytes], stop: list[str]
) -> None:
    text = b"".join(tokens).decode()
    assert "".join(run(tokens, stop)) == cut(text, stop)


@given(pieces(few.map(str.encode)), stops)
def test_with_the_stop_included_nothing_is_held_back_for_it(
    tokens: list[bytes], stop: list[str]
) -> None:
    text = b"".join(tokens).decode()
    machine = LegText(lambda token: tokens[token], {HIDDEN}, stop, include_stop=True)
    shown, read = "", b""
    for token, data in enumerate(tokens):
        shown += machine.feed(token)
        read += data
        if not machine.stopped:
            assert shown == read.decode("utf-8", "ignore")
    assert shown + machine.finish() == cut(text, stop, include_stop=True)


@given(pieces(st.just(MIXED.encode())), st.booleans(), st.data())
def test_any_cut_of_any_writing_and_any_stop_in_it(
    tokens: list[bytes], include_stop: bool, data: st.DataObject
) -> None:
    """Inside a joined emoji, too: a stop is a string, not a grapheme."""
    at = data.draw(st.integers(0, len(MIXED) - 1))
    stop = [MIXED[at : data.draw(st.integers(at + 1, len(MIXED)))]]
    deltas = run(tokens, stop, include_stop=include_stop)
    assert "".join(deltas) == cut(MIXED, stop, include_stop)
    assert not any("\ufffd" in delta for delta in deltas)


@given(pieces(few.map(str.encode)), stops)
def test_characters_count_all_that_was_read(tokens: list[bytes], stop: list[str]) -> None:
    machine = LegText(lambda token: tokens[token], {HIDDEN}, stop)
    read = b""
    for token, data in enumerate(tokens):
        machine.feed(token)
        read += data
        if machine.stopped:
            return
        assert machine.characters == len(read.decode("utf-8", "ignore"))


@given(pieces(st.binary(max_size=24)))
def test_broken_bytes_become_the_same_marks_however_they_are_cut(tokens: list[bytes]) -> None:
    assert "".join(run(tokens)) == b"".join(tokens).decode("utf-8", "replace")


@given(pieces(few.map(str.encode)), stops)
def test_what_is_held_back_is_a_partial_match_or_an_incomplete_character(
    tokens: list[bytes], stop: list[str]
) -> None:
    machine = LegText(lambda token: tokens[token], {HIDDEN}, stop)
    shown, read = "", b""
    for token, data in enumerate(tokens):
        shown += machine.feed(token)
        read += data
        if machine.stopped:
            return
        held = read.decode("utf-8", "ignore").removeprefix(shown)
        assert not held or any(s.startswith(held) for s in stop)


def test_after_a_stop_there_is_no_more_text() -> None:
    assert run([b"ab", b"c", b"d"], ["b"]) == ["a", "", "", ""]


def test_deltas_of_a_stop_over_three_tokens_that_begins_inside_one() -> None:
    assert run([b"xS", b"TO", b"Py"], ["STOP"]) == ["x", "", "", ""]


def test_a_partial_match_that_fails_comes_out_with_the_next_token() -> None:
    assert run([b"S", b"T", b"A", b"S"], ["STOP"]) == ["", "", "STA", "", "S"]


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run([b"abcd"], ["abcd", "c"]) == ["ab", ""]
    assert run([b"abc"], ["bc", "abc", "c"]) == ["", ""]


def test_a_character_is_shown_when_it_is_complete() -> None:
    assert run([b"\xf0", b"\x9f\x99", b"\x82"]) == ["", "", "🙂", ""]
    assert run([b"\xf0", b"\x9f"]) == ["", "", "\ufffd"]


def test_a_hidden_token_is_no_text_and_breaks_no_character() -> None:
    machine = LegText({1: b"\xc3", 2: b"\xa9"}.__getitem__, {HIDDEN})
    assert [machine.feed(token) for token in (1, HIDDEN, 2)] == ["", "", "é"]


@pytest.mark.parametrize(("unsearched", "text"), [(0, ""), (1, "x"), (2, "xx"), (3, "xxx")])
def test_stops_are_not_looked_for_before_min_tokens(unsearched: int, text: str) -> None:
    assert "".join(run([b"x", b"x", b"x"], ["x"], unsearched)) == text
