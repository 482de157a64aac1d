"""What one engine step computes: plain data between the scheduler (pure) and the runner.

Rows, plans and results are values, which nobody changes. They are not frozen: some are made for
each row of each step, and a frozen one takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.shared.sampling.edits import Edits
from kvrelay.shared.types import Logprobs, SamplingParams


@dataclass(slots=True)
class PlannedRow:
    """One leg's part of a step: compute `tokens` at positions start, start+1, ... and maybe sample.

    `blocks` is the leg's block table (block ids in order): the token at position p lives in block
    `blocks[p // block_size]`, slot `p % block_size`. Positions < start have their KV.
    """

    key: str
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    """The last of `tokens` is the leg's last known token: its logits give the next."""
    sampling: SamplingParams
    choice: int = 0
    index: int = 0
    """Output index of the token to be sampled."""
    banned: tuple[int, ...] = ()
    """Token ids that may not be drawn now: EOS and stop ids before `min_tokens`, ends of bad
    words."""
    edits: Edits | None = None
    """What is done to the logits before the draw."""
    told: Sequence[int] = ()
    """If the prompt's logprobs are wanted: what follows each of `tokens` there."""


@dataclass(slots=True)
class Plan:
    """One step. Rows are independent: a row's result does not depend on the others (L1)."""

    step: int
    rows: tuple[PlannedRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block) pairs copied before the step."""

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """What a step produced: the next token of each row that asked to sample, by row key."""

    step: int
    sampled: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Why a row that asked to sample has no token (its logits are no numbers), by row key."""
    complete: set[str] = field(default_factory=set)
    """Rows whose answer is what its grammar wants, with the token they got: nothing can follow."""
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """Of the next tokens, for rows that want them."""
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)
    """Of `PlannedRow.told`."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How a runner computes."""

    threads: int
    """Compute threads of the whole process; no result depends on it."""
    max_model_len: int
    """Positions 0 .. max_model_len - 1 can be computed."""
    vocab_limit: int
    """Ids from here on pad the embedding table past the tokenizer's vocabulary: never sampled."""


class Runner(Protocol):
    """Executes plans on a device. Called from the engine thread only."""

    def run(self, plan: Plan, *, alone: bool = False) -> StepResult:
        """Compute the step, write its KV into the pool, and sample. Blocking.

        `alone`: on the calling thread, if that can be; no result depends on it.
        """
        ...

    @property
    def progress(self) -> int:
        """A counter that grows at least once per layer while a step runs (for liveness)."""
        ...
