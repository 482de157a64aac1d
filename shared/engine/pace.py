"""How much work a step may hold so that it lasts about as long as it should.

A short step is what makes cancelling, progress and fairness quick. Work is counted in tokens that
have nobody before them (`work_of`). Time per token is a running mean over the last tokens rather
than over the last steps: a small step says little about a large one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTHING = 0.3
APART_MOST_NS = 100_000_000
"""A quarter of the time after which an engine that makes no progress counts as stuck."""
WINDOW_TOKENS = 1024
"""A mean over tokens forgets what is longer ago than about so many."""


@dataclass(slots=True)
class MeanTime:
    """Time per token: the plain mean over all tokens at first, then over about the last ones."""

    ns_per_token: float = 0.0
    """0 until measured."""
    _tokens: int = 0

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        """A sample counts for as much as it has tokens."""
        self._tokens = min(self._tokens + tokens, max(WINDOW_TOKENS, tokens))
        self.ns_per_token += tokens / self._tokens * (elapsed_ns / tokens - self.ns_per_token)

    @property
    def tokens_per_s(self) -> float:
        """0 until measured."""
        return 1e9 / self.ns_per_token if self.ns_per_token else 0.0


@dataclass(slots=True)
class Pace:
    """`budget()` before a step, `observe()` after it."""

    max_tokens: int
    """A step's budget until it was measured how long one takes."""
    floor_tokens: int
    """Never less than this, or nothing would move on a slow machine: one block."""
    target_step_ns: int
    beside_streams: int | None = None
    """Most work on prompts in a step in which streams get their next token; None is no bound."""
    steps: MeanTime = field(default_factory=MeanTime)
    """Of steps in which prompts are computed, by all their work."""
    prompts: MeanTime = field(default_factory=MeanTime)
    """Of the same steps by the prompts' tokens alone, whatever streams run beside them."""
    output_step_ns: float = 0.0
    """Of steps that only decode, lately, and how many streams were in them."""
    output_streams: float = 0.0
    output_work_ns: float = 0.0
    """Of the same steps the time that the engine's thread had a processor."""

    def budget(self, streams: int) -> int:
        """Work for a step beside which `streams` legs get their next token: those count, too."""
        fitting = self.max_tokens - streams
        if self.steps.ns_per_token:
            left_ns = max(self.target_step_ns - self._outputs_ns(streams), 0.0)
            fitting = int(left_ns / self.steps.ns_per_token)
        if streams and self.beside_streams is not None:
            fitting = min(fitting, self.beside_streams)
        return streams + max(self.floor_tokens, fitting - fitting % self.floor_tokens)

    def _outputs_ns(self, streams: int) -> float:
        """What a step of so many streams takes. Most of the first one's token is a fixed cost, so
        a stream more than lately is about as dear as a token of a prompt."""
        if streams <= self.output_streams:
            return streams / self.output_streams * self.output_step_ns if streams else 0.0
        return self.output_step_ns + (streams - self.output_streams) * self.steps.ns_per_token

    def observe(self, work: int, elapsed_ns: int, work_ns: int, *, outputs_only: bool) -> None:
        """A step of so much work; a token of a stream is one."""
        if outputs_only:
            self.output_step_ns = smooth(self.output_step_ns, elapsed_ns)
            self.output_work_ns = smooth(self.output_work_ns, work_ns)
            self.output_streams = smooth(self.output_streams, work)
        elif work >= self.floor_tokens:
            self.steps.observe(work, elapsed_ns)

    def apart_ns(self, duty: float) -> float:
        """From the begin of a step that only decodes to the next, for taking only this part of a
        processor's time: at most half of what a step may last, and never so long that it seems
        stuck. How long a step lasts would not do: the less it is given, the longer it lasts."""
        most_ns = min(self.target_step_ns / 2, APART_MOST_NS)
        return min(self.output_work_ns / duty, most_ns) if duty < 1.0 else 0.0

    def observe_prompts(self, tokens: int, elapsed_ns: int) -> None:
        """A step that computed so many tokens of prompts, whatever else was in it."""
        if tokens >= self.floor_tokens:
            self.prompts.observe(tokens, elapsed_ns)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts advance; 0 until it was measured."""
        return self.prompts.tokens_per_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Over all legs of a step; 0 until it was measured."""
        return 1e9 * self.output_streams / self.output_step_ns if self.output_step_ns else 0.0


def smooth(mean: float, sample: float) -> float:
    return sample if mean == 0.0 else mean + SMOOTHING * (sample - mean)
