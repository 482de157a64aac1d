"""Legs wait for their grammar without holding anybody up, and each ends once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvrelay.shared.engine import messages as m
from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.types import EndReason, LegRef, LegSpec, SamplingParams
from kvrelay.shared.worker.grammars import GrammarGate


class SlowStore(GrammarStore):
    """Compiles when it may; `bad` is no grammar."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("nothing is compiled here"))
        self.may = threading.Event()
        self.opened: list[str] = []
        self.here: set[str] = set()

    def open(self, key: str, grammar: str, seen: object) -> None:
        assert self.may.wait(5)
        if grammar == "bad":
            raise BadGrammar("no good")
        self.opened.append(key)
        self.here.add(key)

    def close(self, key: str) -> None:
        self.here.discard(key)


@dataclass
class Rig:
    store: SlowStore
    posted: list[m.Event] = field(default_factory=list)
    ended: list[m.Ended] = field(default_factory=list)
    gate: GrammarGate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = GrammarGate(self.store, self.posted.append, self._end)

    def _end(self, ended: m.Ended) -> None:
        self.ended.append(ended)
        self.gate.ended(ended.ref)  # as the node does

    async def settled(self) -> None:
        self.store.may.set()
        assert self.gate._thread is not None
        await asyncio.wrap_future(self.gate._thread.submit(lambda: None))
        await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig(SlowStore())
    yield made
    made.store.may.set()
    made.gate.close()


def serve(name: str, grammar: str, owner: str = "o") -> m.Serve:
    sampling = SamplingParams(grammar=grammar)
    return m.Serve(owner, LegRef(name, 0, 1), LegSpec(name, (1,), sampling), handoff=True)


async def test_who_has_no_grammar_does_not_wait(rig: Rig) -> None:
    held, free = serve("held", "g"), serve("free", "")
    rig.gate.admit(held)
    rig.gate.admit(held)
    rig.gate.admit(free)
    assert rig.posted == [free] and len(rig.gate) == 1
    await rig.settled()
    assert rig.posted == [free, held] and rig.store.here == {held.ref.key}
    rig.gate.ended(held.ref)
    rig.gate.ended(free.ref)
    assert not rig.store.here


async def test_a_bad_one_ends_its_leg(rig: Rig) -> None:
    leg = serve("l", "bad")
    rig.gate.admit(leg)
    await rig.settled()
    [ended] = rig.ended
    assert ended == m.Ended("o", leg.ref, EndReason.FAILED, "grammar: no good", retryable=False)
    assert not rig.posted and not len(rig.gate)


async def test_cancelled_while_it_is_compiled(rig: Rig) -> None:
    leg, other = serve("l", "g"), serve("other", "g", owner="gone")
    rig.gate.admit(leg)
    rig.gate.admit(other)
    assert rig.gate.cancel(leg.ref) and not rig.gate.cancel(leg.ref)
    rig.gate.owner_gone("gone")
    await rig.settled()
    assert [(end.ref, end.reason) for end in rig.ended] == [
        (leg.ref, EndReason.CANCELLED),
        (other.ref, EndReason.CANCELLED),
    ]
    assert not rig.posted and not rig.store.here
    assert rig.store.opened == ["l#0", "other#0"], "both were compiled after all"
