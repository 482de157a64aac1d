"""What is measured: prompts to read, and steps of batches; and what a step of them must move."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.services.bench.errors import BenchError
from kvrelay.shared.checkpoint.config import ModelConfig

CONTEXT_TOKENS = 128
DECODE_STEPS = 64
COST_CONTEXTS = (128, 512, 2048, 8000)
COST_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` prompts of `prompt_tokens` at once. Measured are the prompts themselves, `repeats`
    times, when `steps` is 0; else `steps` decode steps after them."""

    name: str
    batch: int
    prompt_tokens: int
    steps: int
    repeats: int = 1

    def prompts(self, model: ModelConfig, seed: str) -> list[list[int]]:
        """Random tokens, the same for the same seed; no two prompts share a beginning."""
        draw = random.Random(f"{self.name} {seed}")
        ends = set(model.eos_token_ids)
        able = [token for token in range(model.vocab) if token not in ends]
        return [draw.choices(able, k=self.prompt_tokens) for _ in range(self.batch)]


def decode(batch: int) -> Case:
    return Case(f"decode_b{batch}", batch, CONTEXT_TOKENS, DECODE_STEPS)


CASES = (
    Case("prefill_512", 1, 512, 0, repeats=3),
    Case("prefill_2048", 1, 2048, 0),
    *(decode(batch) for batch in (1, 4, 8, 16, 32)),
)


def chosen(names: Sequence[str]) -> tuple[Case, ...]:
    """Cases by name, in the order of `CASES`; none named is all. Raises `BenchError`."""
    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            raise BenchError(f"cases: {name} is not one of {', '.join(known)}")
    return tuple(case for case in CASES if not names or case.name in names)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step (prefill: one whole prompt) cannot do without."""

    weight_bytes: int
    """Every matrix once; of a prompt, once for each of its chunks."""
    kv_bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flops + other.flops,
        )


def step_work(model: ModelConfig, item_bytes: int, rows: Iterable[tuple[int, int]]) -> Work:
    """Of one step whose rows compute `count` tokens after `context` others, the last with logits.

    FLOPs: two per weight and token, four per head element, query and key that it sees.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.layer_weights
    head = model.hidden * model.vocab
    kv_bytes, flops = 0, 0
    for context, count in rows:
        seen = sum(range(context + 1, context + count + 1))
        flops += 2 * (count * model.layers * layer + head) + 4 * model.layers * q * seen
        kv_bytes += model.layers * 2 * kv * item_bytes * (context + count)
    return Work((model.layers * layer + head) * item_bytes, kv_bytes, flops)


def case_work(case: Case, model: ModelConfig, item_bytes: int, chunk_tokens: int) -> Work:
    """Of a decode case: of a step in the middle of it. Of a prompt: of all its chunks."""
    if case.steps:
        context = case.prompt_tokens + case.steps // 2
        return step_work(model, item_bytes, [(context, 1)] * case.batch)
    work = Work(0, 0, 0)
    for first in range(0, case.prompt_tokens, chunk_tokens):
        count = min(chunk_tokens, case.prompt_tokens - first)
        work += step_work(model, item_bytes, [(first, count)] * case.batch)
    return work
