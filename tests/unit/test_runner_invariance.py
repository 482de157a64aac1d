"""L1 of the runner: a request's tokens and KV do not depend on what else happens around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import pytest
import torch
from tests.tinymodel import write_tiny_model
from torch import Tensor

from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.cache import KVCache
from kvrelay.shared.engine.plan import Plan, PlannedRow
from kvrelay.shared.engine.runner import RunnerSettings, TorchRunner, load_runner
from kvrelay.shared.kv.layout import DType, KVLayout
from kvrelay.shared.types import SamplingParams

POOL_BLOCKS = 200
STEPS = 5
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 50},
    "qwen2": {},
    "qwen3": {},
}


@dataclass
class Request:
    """A prompt on its way through a runner; `blocks` may be in any order and place."""

    key: str
    prompt: Sequence[int]
    sampling: SamplingParams
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) == STEPS

    def row(self, most_tokens: int) -> PlannedRow:
        """Its next chunk, of at most that many tokens."""
        known = [*self.prompt, *self.tokens]
        chunk = known[self.computed : self.computed + most_tokens]
        start, self.computed = self.computed, self.computed + len(chunk)
        last = self.computed == len(known)
        return PlannedRow(
            self.key, chunk, start, self.blocks, last, self.sampling, 1, index=len(self.tokens)
        )


def requests() -> list[Request]:
    """Lengths around the borders of tiles and blocks, greedy and drawn."""
    lengths = (1, 3, 17, 63, 128, 129, 301)
    return [
        Request(
            f"r{length}",
            [(length + 7 * at) % 500 for at in range(length)],
            SamplingParams(temperature=1.0, top_p=0.95, seed=length)
            if length % 2
            else SamplingParams(temperature=0.0),
        )
        for length in lengths
    ]


def make_runner(folder: Path, dtype: DType, threads: int, block_size: int) -> TorchRunner:
    """A runner whose pool holds NaN wherever nothing was written."""
    source = resolve_model(str(folder))
    config = read_config(source)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, dtype)
    cache = KVCache(layout, POOL_BLOCKS * 16 // block_size)
    cache.tensor.fill_(torch.nan)
    settings = RunnerSettings(threads=threads, max_model_len=1024, vocab_limit=config.vocab)
    return load_runner(source, config, cache, settings)


def give_blocks(all_requests: list[Request], order: Iterator[int], block_size: int) -> None:
    """Exactly the blocks each will use, and past them an id that no pool has."""
    for request in all_requests:
        needed = -(-(len(request.prompt) + STEPS) // block_size)
        request.blocks = [next(order) for _ in range(needed)] + [10**9]


def kv_bits(runner: TorchRunner, request: Request) -> Tensor:
    """The stored KV of all computed tokens, [tokens, L, 2, Hk, D]."""
    pool = runner.cache.tensor[request.blocks[:-1]]
    return pool.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[: request.computed]


def run_alone(runner: TorchRunner, request: Request) -> None:
    while not request.done:
        request.tokens.append(runner.run(Plan(0, (request.row(10**6),))).sampled[request.key])


def run_together(runner: TorchRunner, all_requests: list[Request]) -> None:
    """Chunks of changing sizes, neighbours and threads that come and go, rows in changing order."""
    sizes = cycle([1, 3, 16, 2, 47, 64, 5, 130, 7, 9, 31, 17, 1, 40])
    step = 0
    while alive := [request for request in all_requests if not request.done]:
        step += 1
        chosen = [r for at, r in enumerate(alive) if (at + step) % 3 or len(alive) < 3]
        rows = [request.row(next(sizes)) for request in chosen]
        rows = rows[step % len(rows) :] + rows[: step % len(rows)]
        sampled = runner.run(Plan(step, tuple(rows)), alone=step % 3 == 1).sampled
        for request in chosen:
            request.tokens += [sampled[request.key]] if request.key in sampled else []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_kv_are_those_of_the_request_alone(
    tmp_path: Path, family: str, dtype: DType
) -> None:
    folder = write_tiny_model(tmp_path, family=family, **FAMILIES[family])
    lonely, busy = requests(), requests()
    expected = []
    for request in lonely:
        runner = make_runner(folder, dtype, threads=2, block_size=16)
        give_blocks([request], iter(range(POOL_BLOCKS)), 16)
        run_alone(runner, request)
        expected.append(kv_bits(runner, request))

    runner = make_runner(folder, dtype, threads=1, block_size=8)
    shuffled = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    give_blocks(busy, iter(shuffled), 8)
    run_together(runner, busy)

    assert {r.key: r.tokens for r in busy} == {r.key: r.tokens for r in lonely}
    for request, bits in zip(busy, expected, strict=True):
        assert torch.equal(kv_bits(runner, request), bits), request.key
