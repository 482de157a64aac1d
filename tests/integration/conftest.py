"""The clusters of the integration tests: real processes, one Valkey each, UCX, a tiny model.

Those that the collected tests ask for are started once, side by side, and left as they were found.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.stack import Stack, until
from tests.tinymodel import write_tiny_model

from kvrelay.shared.types import Role

MODEL_POSITIONS = 2048
SMALL_POOL_BYTES = 1 << 20
SHAPES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "unsplit": {"prefill": 0, "decode": 0, "max_num_seqs": 64},
    "tcp": {"prefill": 2, "decode": 2, "env": {"UCX_TLS": "tcp"}, "max_num_batched_tokens": 64},
    "small": {"kv_cache_memory_bytes": SMALL_POOL_BYTES, "max_num_seqs": 8},
}
"""`split` computes prompts in many small steps; `small` has 64 blocks on each side, `tcp` as few on
one of its prefill workers only."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 KiB of KV per block of 16 tokens in bfloat16."""
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny",
        head_dim=64,
        max_position_embeddings=MODEL_POSITIONS,
    )


@pytest.fixture(scope="session")
def stacks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[dict[str, Stack]]:
    asked = {name for item in request.session.items for name in asked_by(item)}
    defaults = {"kv_cache_memory_bytes": 32 << 20, "threads": 1}
    started = {
        name: Stack(tmp_path_factory.mktemp(name), tiny_model, **{**defaults, **shape})
        for name, shape in SHAPES.items()
        if name in asked
    }
    if "tcp" in started:
        uneven = started["tcp"].make_worker(Role.PREFILL, 0, kv_cache_memory_bytes=SMALL_POOL_BYTES)
        started["tcp"].workers[0] = uneven
    try:
        for stack in started.values():
            stack.launch()
        for stack in started.values():
            stack.wait_ready()
        yield started
    finally:
        with ThreadPoolExecutor() as pool:
            [*pool.map(Stack.stop, started.values())]


def asked_by(item: pytest.Item) -> Iterator[str]:
    """Names of fixtures, and of the stack that a parameter names."""
    yield from getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "stack" in callspec.params:
        yield callspec.params["stack"]


@pytest.fixture
def stack(request: pytest.FixtureRequest, stacks: dict[str, Stack]) -> Iterator[Stack]:
    """The one named by the test's parameter."""
    yield from left_as_found(stacks[request.param])


def left_as_found(stack: Stack) -> Iterator[Stack]:
    """One that died is told here, once, and started again: the next test finds it whole."""
    yield stack
    dead = [part for part in (*stack.workers, stack.router) if part.dead]
    causes = [part.last_words() for part in dead]
    for part in dead:
        part.start()
    if dead:
        stack.look_around()
    until(stack.baseline, 2.0, "nothing is held when a test is over")
    assert not causes, "; ".join(causes)


@pytest.fixture
def split(stacks: dict[str, Stack]) -> Iterator[Stack]:
    yield from left_as_found(stacks["split"])


@pytest.fixture
def unsplit(stacks: dict[str, Stack]) -> Iterator[Stack]:
    yield from left_as_found(stacks["unsplit"])


@pytest.fixture
def tcp(stacks: dict[str, Stack]) -> Iterator[Stack]:
    yield from left_as_found(stacks["tcp"])


@pytest.fixture
def small(stacks: dict[str, Stack]) -> Iterator[Stack]:
    yield from left_as_found(stacks["small"])
