"""Blocks: in each round every system computes every case once, in a random order of both."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.services.bench.cases import COST_BATCHES, COST_CONTEXTS, Case
from kvrelay.services.bench.drivers.serve import Reading
from kvrelay.services.bench.systems import RunningSystem
from kvrelay.shared.checkpoint.config import ModelConfig

PRODUCT_STEPS = 15
COST_STEPS = 5
WARM_UP = "warm-up"
"""The seed of the block that is not counted: first touch of memory and code."""

Report = Callable[[str, int, int], None]
"""Called with (what is measured now, blocks done, blocks in all)."""


class Measured(Protocol):
    """What a block needs of a running system."""

    @property
    def name(self) -> str: ...

    def measure(self, prompts: Sequence[Sequence[int]], steps: int) -> Reading: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """How much is measured, and in which order."""

    rounds: int
    seconds: float
    """No round begins that would probably end later than this."""
    seed: int


Readings = dict[str, dict[str, list[Reading]]]
"""By case and system, one reading per round."""


def run_blocks(
    systems: Sequence[Measured],
    cases: Sequence[Case],
    model: ModelConfig,
    schedule: Schedule,
    report: Report,
) -> Readings:
    """At least one round after the warm-up, all rounds whole."""
    readings: Readings = {c.name: {s.name: [] for s in systems} for c in cases}
    order = random.Random(schedule.seed)
    in_all = (schedule.rounds + 1) * len(cases) * len(systems)
    done, begun_s, longest_s = 0, time.monotonic(), 0.0
    for number in range(schedule.rounds + 1):
        if number > 1 and time.monotonic() - begun_s + longest_s > schedule.seconds:
            break
        round_begun_s = time.monotonic()
        seed = f"{schedule.seed} {number}" if number else WARM_UP
        for case in order.sample(cases, len(cases)):
            for system in order.sample(systems, len(systems)):
                report(f"round {number}: {case.name} on {system.name}", done, in_all)
                reading = run_block(system, case, model, seed)
                if number:
                    readings[case.name][system.name].append(reading)
                done += 1
        longest_s = max(longest_s, time.monotonic() - round_begun_s)
    return readings


def run_block(system: Measured, case: Case, model: ModelConfig, seed: str) -> Reading:
    """One case on one system; the same seed gives every system the same prompts."""
    return joined(
        system.measure(case.prompts(model, f"{seed} {again}"), case.steps)
        for again in range(case.repeats)
    )


def joined(parts: Iterable[Reading]) -> Reading:
    """Several readings as if they were one."""
    each = list(parts)
    return Reading(
        tokens=sum(part.tokens for part in each),
        seconds=sum(part.seconds for part in each),
        cpu_seconds=sum(part.cpu_seconds for part in each),
        steps=sum(part.steps for part in each),
        phases_s={name: sum(part.phases_s[name] for part in each) for name in each[0].phases_s},
    )


def products_ms(system: RunningSystem, case: Case, chunk_tokens: int) -> float | None:
    """All matrix products of a step of the case (of a whole prompt for prefill) and nothing else,
    by the system's own kernels; None where it cannot tell them from the rest."""
    total_s = 0.0
    for (counts, logits), times in steps_of(case, chunk_tokens).items():
        answer = system.ask("products", counts=counts, logits=logits, steps=PRODUCT_STEPS)
        if answer["products_s"] is None:
            return None
        total_s += times * answer["products_s"]
    return 1e3 * total_s


def steps_of(case: Case, chunk_tokens: int) -> Counter[tuple[tuple[int, ...], bool]]:
    """How often a step of which shape is computed: (tokens of each request, whether it samples)."""
    if case.steps:
        return Counter([((1,) * case.batch, True)])
    whole, rest = divmod(case.prompt_tokens, chunk_tokens)
    counts = [chunk_tokens] * whole + [rest] * (rest > 0)
    return Counter([*(((count,), False) for count in counts[:-1]), ((counts[-1],), True)])


@dataclass(frozen=True, slots=True)
class Cost:
    """One decode step of `batch` requests with `context` tokens each, without a scheduler."""

    context: int
    batch: int
    step_ms: float | None
    """None: so many tokens do not fit into the pool."""


def run_costs(system: RunningSystem, report: Report) -> list[Cost]:
    """Small batches first, so that growth is seen early. What the pool held before is lost."""
    room_tokens = system.ask("fill")["tokens"]
    costs: list[Cost] = []
    in_all = len(COST_CONTEXTS) * len(COST_BATCHES)
    for context in COST_CONTEXTS:
        for batch in COST_BATCHES:
            report(f"cost of {batch} x {context}", len(costs), in_all)
            fits = batch * (context + system.about["block_size"]) <= room_tokens
            fits = fits and context < system.about["max_model_len"]
            step_ms = None
            if fits:
                answer = system.ask("bare_step", batch=batch, context=context, steps=COST_STEPS)
                step_ms = 1e3 * answer["wall_s"]
            costs.append(Cost(context, batch, step_ms))
    return costs


def rates(readings: Sequence[Reading]) -> list[float]:
    """Tokens per second of each block."""
    return [reading.tokens / reading.seconds for reading in readings]


def median_rates(by_system: Mapping[str, Sequence[Reading]]) -> dict[str, float]:
    return {name: statistics.median(rates(each)) for name, each in by_system.items()}
