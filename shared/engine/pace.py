"""How many tokens a step may hold so that it lasts about as long as it should.

A short step is what makes cancelling, progress and fairness quick. The estimate is a running mean
of measured time per token over steps large enough to say something.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.3


@dataclass(slots=True)
class Pace:
    """`budget()` before a step, `observe()` after it."""

    max_tokens: int
    floor_tokens: int
    """Never less than this, or nothing would move on a slow machine: one block."""
    target_step_ns: int
    ns_per_token: float = 0.0
    output_ns_per_token: float = 0.0
    """The same for steps that only decode."""

    def budget(self, streams: int) -> int:
        """Tokens for a step beside which `streams` legs get their next token: those count, too."""
        if self.ns_per_token == 0.0:
            return self.max_tokens
        left_ns = max(self.target_step_ns - streams * self.output_ns_per_token, 0.0)
        fitting = min(self.max_tokens - streams, int(left_ns / self.ns_per_token))
        return streams + max(self.floor_tokens, fitting - fitting % self.floor_tokens)

    def observe(self, tokens: int, elapsed_ns: int, *, outputs_only: bool) -> None:
        if outputs_only:
            self.output_ns_per_token = smooth(self.output_ns_per_token, elapsed_ns / tokens)
        elif tokens >= self.floor_tokens:
            self.ns_per_token = smooth(self.ns_per_token, elapsed_ns / tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 until it was measured."""
        return 1e9 / self.ns_per_token if self.ns_per_token else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Over all legs of a step; 0 until it was measured."""
        return 1e9 / self.output_ns_per_token if self.output_ns_per_token else 0.0


def smooth(mean: float, sample: float) -> float:
    return sample if mean == 0.0 else mean + SMOOTHING * (sample - mean)
