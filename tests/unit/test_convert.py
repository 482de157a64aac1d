"""What goes over the wire comes back as it was."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.shared.rpc.convert import (
    leg_from_wire,
    leg_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
)
from kvrelay.shared.rpc.gen import relay_pb2 as pb
from kvrelay.shared.types import MAX_SEED, LegSpec, Logprobs, SamplingParams

NUMBERS = st.floats(allow_nan=False)
SMALL = st.floats(allow_nan=False, width=32)
IDS = st.integers(0, 2**31 - 1)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    kinds = {
        "float": NUMBERS,
        "bool": st.booleans(),
        "str": st.text(),
        "int": st.integers(0, 2**31 - 1),
        "int | None": st.none() | st.integers(0, 20),
        "tuple[int, ...]": st.lists(IDS, max_size=4).map(tuple),
        "tuple[tuple[int, float], ...]": st.lists(st.tuples(IDS, NUMBERS), max_size=4).map(tuple),
        "tuple[tuple[int, ...], ...]": st.lists(st.lists(IDS, max_size=3).map(tuple)).map(tuple),
    }
    values = {each.name: draw(kinds[str(each.type)]) for each in fields(SamplingParams)}
    return SamplingParams(**{**values, "seed": draw(st.integers(0, MAX_SEED))})


@given(samplings(), st.lists(IDS, max_size=3), st.text(), st.integers(-9, 9))
def test_a_leg(how: SamplingParams, seen: list[int], salt: str, priority: int) -> None:
    spec = LegSpec("leg", (1, 2), how, 3, tuple(seen), (7,), priority, salt)
    wire = pb.Leg.FromString(leg_to_wire(spec).SerializeToString())
    assert leg_from_wire("leg", wire) == spec


@given(st.integers(0, 20), st.data())
def test_logprobs(tops: int, data: st.DataObject) -> None:
    top = st.lists(st.tuples(IDS, SMALL), min_size=tops, max_size=tops).map(tuple)
    each = data.draw(st.lists(st.builds(Logprobs, SMALL, st.integers(1, 2**31), top), max_size=5))
    wire = pb.Logprobs.FromString(logprobs_to_wire(each).SerializeToString())
    assert logprobs_from_wire(wire) == tuple(each)


def test_of_a_long_prompt_each_position_is_a_few_bytes() -> None:
    one = Logprobs(-1.5, 99, tuple((151_000 + at, -2.0 - at) for at in range(20)))
    assert len(logprobs_to_wire([one] * 1000).SerializeToString()) < 1000 * (4 + 1 + 20 * 7) + 50
