"""The engine on a fraction of the KV memory it needs: every request ends, with the same tokens.

200 requests come at once, on memory for all that then run, and on a fraction of the blocks that
were in use at most. No HTTP, no relay: `python -m loadtests.small_pool --help`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.services.bench.drivers.kvrelay_driver import KvrelaySystem, open_system
from kvrelay.shared.checkpoint.fetch import default_model_path
from kvrelay.shared.engine import messages as m
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.pace import Pace
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.types import EndReason, LegRef, LegSpec, SamplingParams

TARGET_STEP_NS = 200_000_000


@dataclass(slots=True)
class Outcome:
    """Of all requests on a pool of `blocks`."""

    blocks: int
    took_s: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: int = 0
    preemptions: int = 0
    computed: int = 0
    """Tokens whose KV was computed, again included."""
    most_blocks: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.took_s


def specs(requests: int, vocab: int, seed: int) -> list[LegSpec]:
    """16 to 128 tokens in and 32 to 96 out, every other one drawn; no two share a prefix."""
    rng = random.Random(seed)
    out = []
    for at in range(requests):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(16, 128)))
        sampling = SamplingParams(
            temperature=0.8 if at % 2 else 0.0,
            seed=at,
            max_tokens=rng.randint(32, 96),
            ignore_eos=True,
        )
        out.append(LegSpec(f"{at}", prompt, sampling))
    return out


def serve(system: KvrelaySystem, legs: Sequence[LegSpec], blocks: int) -> Outcome:
    """Everything at once, on the first `blocks` of the system's memory, to the last token."""
    outcome = Outcome(blocks, tokens={leg.leg: [] for leg in legs})
    limits = system.engine.state.limits
    engine = Engine(limits, blocks)
    pace = Pace(limits.max_num_batched_tokens, limits.block_size, TARGET_STEP_NS)
    for at, leg in enumerate(legs):
        engine.handle(m.Serve("", LegRef(leg.leg, 0, at), leg, handoff=False))
    begun_s = time.monotonic()
    while engine.state.legs:
        step(system, engine, pace, outcome)
    outcome.took_s = time.monotonic() - begun_s
    engine.state.check()
    outcome.preemptions, outcome.computed = engine.state.preemptions, engine.state.planned_tokens
    return outcome


def step(system: KvrelaySystem, engine: Engine, pace: Pace, outcome: Outcome) -> None:
    plan, out = engine.plan(pace.budget(engine.state.streams))
    if plan is None:
        raise RuntimeError(f"nobody can be computed, and {len(engine.state.legs)} wait")
    outcome.most_blocks = max(outcome.most_blocks, engine.state.pool.counts().in_use)
    begun_ns = time.monotonic_ns()
    result = system.runner.run(plan)
    elapsed_ns = time.monotonic_ns() - begun_ns
    pace.observe(plan.tokens, elapsed_ns, elapsed_ns, outputs_only=plan.tokens == len(plan.rows))
    for item in [*out, *engine.complete(plan, result)]:
        if isinstance(item, m.TokenOut):
            outcome.tokens[item.ref.leg].append(item.token)
        elif isinstance(item, m.Ended):
            outcome.finished += item.reason is EndReason.FINISHED


def table(outcomes: Sequence[Outcome]) -> Table:
    ample = outcomes[0]
    out = Table()
    headings = "blocks", "finished", "same tokens", "preempted", "computed", "tokens/s", "to ample"
    for heading in headings:
        out.add_column(heading, justify="right")
    for each in outcomes:
        same = sum(each.tokens[leg] == tokens for leg, tokens in ample.tokens.items())
        out.add_row(
            f"{each.blocks:,}",
            f"{each.finished}",
            f"{same}",
            f"{each.preemptions}",
            f"{each.computed:,}",
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_s / ample.tokens_per_s:.3f}",
        )
    return out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__)
    out.add_argument("--requests", type=int, default=200, help="default: %(default)s")
    out.add_argument(
        "--fraction", type=int, default=4, help="1/n of the need; default: %(default)s"
    )
    out.add_argument("--rounds", type=int, default=1, help="of ample and small, by turns")
    out.add_argument("--seqs", type=int, default=64, help="most in a step; default: %(default)s")
    out.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    out.add_argument("--seed", type=int, default=0, help="of the requests")
    out.add_argument("--model", type=Path, default=default_model_path())
    return out


def main() -> int:
    """0 when all requests ended with the tokens of the first run on ample memory."""
    given = parser().parse_args()
    settings = {
        "model": str(given.model),
        "threads": given.threads,
        "max_num_seqs": given.seqs,
        "kv_cache_memory_bytes": 1 << 30,
    }
    system = open_system(settings)
    limits: EngineLimits = system.engine.state.limits
    legs = specs(given.requests, limits.vocab_size, given.seed)
    serve(system, legs[:8], system.capacity.blocks)  # the first steps are slower than all others
    outcomes = [serve(system, legs, system.capacity.blocks)]
    small = outcomes[0].most_blocks // given.fraction
    outcomes.append(serve(system, legs, small))
    for _ in range(given.rounds - 1):
        outcomes += [serve(system, legs, blocks) for blocks in (system.capacity.blocks, small)]
    Console(width=120).print(table(outcomes))
    right = (o.finished == len(legs) and o.tokens == outcomes[0].tokens for o in outcomes)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
