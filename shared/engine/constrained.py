"""A runner that lets rows draw only what their grammars allow, and follows what they drew.

Grammars are none of the engine's business: it plans and completes without them, and is told which
answers are complete. So a recorded life can be lived again without any.

A mask is computed right before its step, on the engine's thread: it takes 4 us at a vocabulary of
49,152, which is less than handing it to another thread does. Some grammars grow with what was
said until a mask takes many milliseconds. When the masks of a step take so long that everybody
notices, the rows whose masks do are given up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from kvrelay.shared.engine.plan import Plan, PlannedRow, Runner, StepResult
from kvrelay.shared.errors import BadGrammar
from kvrelay.shared.grammar.matcher import Matcher
from kvrelay.shared.grammar.store import GrammarStore
from kvrelay.shared.sampling.edits import Edits

MASKS_S = 0.03
"""Computing time of a step's masks from which on rows are given up."""
DEAR_MASK_S = 0.0005
"""Those of them are, whose masks take longer on average."""


class ConstrainedRunner:
    """A `Runner` around another. Legs with a grammar are in the store before they are planned."""

    def __init__(self, runner: Runner, grammars: GrammarStore) -> None:
        self._runner = runner
        self._grammars = grammars
        self._edits: WeakKeyDictionary[Matcher, Edits] = WeakKeyDictionary()
        """Of legs that have no others: the same object from step to step."""

    @property
    def progress(self) -> int:
        return self._runner.progress

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        followed = {row.key for row in plan.rows if row.sample and row.sampling.grammar}
        if not followed:
            return self._runner.run(plan, alone=alone)
        failed: dict[str, str] = {}
        until_s = time.thread_time() + MASKS_S
        rows = [
            self._masked(row, until_s, failed) if row.key in followed else row for row in plan.rows
        ]
        result = self._runner.run(replace(plan, rows=tuple(rows)), alone=alone)
        for row in rows:
            if row.key in followed and row.key in result.sampled and row.key not in failed:
                self._follow(row.key, result, failed)
        for key, why in failed.items():
            result.sampled.pop(key, None)
            result.failed[key] = why
        return result

    def _masked(self, row: PlannedRow, until_s: float, failed: dict[str, str]) -> PlannedRow:
        matcher = self._grammars.get(row.key)
        try:
            if matcher is None:
                raise BadGrammar("grammar: this worker has not compiled it")
            # Token 0 of an answer that was relayed was drawn elsewhere.
            matcher.advance(_untold(row, matcher.tokens))
            if matcher.mean_s > DEAR_MASK_S and time.thread_time() > until_s:
                raise BadGrammar("grammar: the answer cannot go on: its next token takes too long")
            mask = matcher.mask()
        except BadGrammar as error:
            failed[row.key] = str(error)
            return row
        if row.edits is not None:
            return replace(row, edits=replace(row.edits, masks=(*row.edits.masks, mask)))
        edits = self._edits.get(matcher)
        if edits is None:
            edits = self._edits[matcher] = Edits()
        edits.masks = (mask,)
        return replace(row, edits=edits)

    def _follow(self, key: str, result: StepResult, failed: dict[str, str]) -> None:
        matcher = self._grammars.get(key)
        if matcher is None:
            return  # its leg ended while the step ran
        try:
            matcher.advance([result.sampled[key]])
        except BadGrammar as error:
            failed[key] = str(error)
            return
        if matcher.complete:
            result.complete.add(key)


def _untold(row: PlannedRow, told: int) -> Sequence[int]:
    """Those of the row's output tokens that the matcher was not told of."""
    count = row.index - told
    if count < 0 or count > len(row.tokens):
        raise BadGrammar(f"grammar: it was told {told} tokens of {row.index}")
    return row.tokens[len(row.tokens) - count :]
