"""How many tokens a step may hold so that it lasts about as long as it should.

A short step is what makes cancelling, progress and fairness quick. Time per token is a running mean
over the last tokens rather than over the last steps: a small step says little about a large one.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.3
WINDOW_TOKENS = 1024
"""A mean over tokens forgets what is longer ago than about so many."""


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
    prompt_ns_per_token: float = 0.0
    """For a token of a prompt, beside whatever streams are in its steps."""

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
            self.ns_per_token = smooth_by_size(self.ns_per_token, tokens, elapsed_ns)

    def observe_prompts(self, tokens: int, elapsed_ns: int) -> None:
        """A step that computed so many tokens of prompts, whatever else was in it."""
        if tokens >= self.floor_tokens:
            self.prompt_ns_per_token = smooth_by_size(self.prompt_ns_per_token, tokens, elapsed_ns)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts advance; 0 until it was measured."""
        return 1e9 / self.prompt_ns_per_token if self.prompt_ns_per_token else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Over all legs of a step; 0 until it was measured."""
        return 1e9 / self.output_ns_per_token if self.output_ns_per_token else 0.0


def smooth(mean: float, sample: float) -> float:
    return sample if mean == 0.0 else mean + SMOOTHING * (sample - mean)


def smooth_by_size(mean_ns_per_token: float, tokens: int, elapsed_ns: int) -> float:
    """The mean with one more sample, which counts for as much as it has tokens."""
    sample = elapsed_ns / tokens
    weight = min(1.0, tokens / WINDOW_TOKENS) if mean_ns_per_token else 1.0
    return mean_ns_per_token + weight * (sample - mean_ns_per_token)
