"""Each variant of the native library against float64, and its law that a row stands alone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from typing import TypeAlias

import pytest
import torch
from tests.native import int32, open_library, randn, random_model, rope_angles, shape_of
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.native.binding import (
    Batch,
    NativeError,
    NativeModel,
    Pool,
    Slot,
    Variant,
)

Sizes: TypeAlias = tuple[tuple[str, int], ...]

LIBRARY = open_library()
VARIANTS = LIBRARY.variants
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def assert_near(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of the dtype, relative to the largest value of each row."""
    worst = (got.double() - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert float(worst.max()) < TOLERANCE[dtype], float(worst.max())


def exact_product(slot: Slot, x: Tensor, weights: dict[Slot, Tensor]) -> Tensor:
    if slot == Slot.GATE:
        return functional.silu(x @ weights[Slot.GATE].T) * (x @ weights[Slot.UP].T)
    if slot == Slot.HEAD:
        return x @ weights.get(Slot.HEAD, weights[Slot.EMBED]).T
    if slot != Slot.Q:
        return x @ weights[slot].T
    pairs = [(Slot.Q, Slot.Q_BIAS), (Slot.K, Slot.K_BIAS), (Slot.V, Slot.V_BIAS)]
    return torch.cat([x @ weights[m].T + weights[bias] for m, bias in pairs], dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_are_those_of_float64_and_rows_stand_alone(
    variant: Variant, dtype: torch.dtype
) -> None:
    bf16 = int(dtype == torch.bfloat16)
    deep = {"hidden": 450, "intermediate": 210, "vocab": 33}  # sums put away on the way
    for sizes in ({}, {"hidden": 96, "intermediate": 176, "head_dim": 16, "tied": 0}, deep):
        shape = shape_of(dtype=bf16, qkv_bias=1, **sizes)
        model, weights = random_model(LIBRARY, shape, variant)
        widths = {Slot.ATTENTION_OUT: shape.heads * shape.head_dim, Slot.DOWN: shape.intermediate}
        for slot in (Slot.Q, Slot.ATTENTION_OUT, Slot.GATE, Slot.DOWN, Slot.HEAD):
            x = randn(300, widths.get(slot, shape.hidden), seed=7).to(dtype).float()
            got = torch.from_numpy(model.linear(slot, 0, x.numpy()))
            assert_near(got, exact_product(slot, x.double(), dict(weights)), dtype)
            for first, count in ((0, 1), (5, 2), (12, 13), (30, 33), (91, 50), (250, 13)):
                part = x[first : first + count].clone()
                alone = torch.from_numpy(model.linear(slot, 0, part.numpy()))
                assert torch.equal(alone, got[first : first + count]), (slot, first, count)
        model.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_neighbour_that_is_no_number_changes_no_other_row(variant: Variant) -> None:
    model, _ = random_model(LIBRARY, shape_of(dtype=1), variant)
    x = randn(40, 70)
    clean = model.linear(Slot.GATE, 0, x.numpy())
    x[[3, 17, 39]] = torch.nan
    dirty = torch.from_numpy(model.linear(Slot.GATE, 0, x.numpy()))
    assert dirty[[3, 17, 39]].isnan().all()
    others = [at for at in range(40) if at not in (3, 17, 39)]
    assert torch.equal(dirty[others], torch.from_numpy(clean)[others])
    model.close()


class Scene:
    """Requests of many shapes in one pool: NaN wherever no key or value of theirs is."""

    SHAPES = ((0, 1), (0, 5), (127, 1), (128, 1), (130, 3), (64, 200), (300, 1), (257, 33))

    def __init__(self, dtype: torch.dtype, window: int, sizes: Sizes) -> None:
        bf16 = int(dtype == torch.bfloat16)
        self.shape = shape_of(window=window, layers=2, dtype=bf16, **dict(sizes))
        self.dtype = dtype
        size, heads, dim = self.shape.block_size, self.shape.kv_heads, self.shape.head_dim
        needed = [-(-(start + count) // size) for start, count in self.SHAPES]
        blocks = sum(needed) + 2
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[order.pop() for _ in range(each)] for each in needed]
        self.clean = torch.full((blocks, 2, 2, heads, size, dim), torch.nan, dtype=dtype)
        self.past = []  # [2, start, Hk, D] of each request
        for number, (start, _) in enumerate(self.SHAPES):
            kv = randn(2, start, heads, dim, seed=number + 1).to(dtype)
            at = torch.arange(start)
            where = torch.tensor(self.tables[number])[at // size]
            self.clean[where, 1, :, :, at % size] = kv.permute(1, 0, 2, 3)
            self.past.append(kv)
        width = (self.shape.heads + 2 * heads) * dim
        self.qkv = randn(sum(count for _, count in self.SHAPES), width)

    def model(self, variant: Variant) -> NativeModel:
        return random_model(LIBRARY, self.shape, variant, positions=512)[0]

    def attend(
        self, model: NativeModel, chosen: list[tuple[int, int, int]], before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mixes of (request, skipped tokens, tokens) in one batch, and the pool after it."""
        pool = (self.clean if before is None else before).clone()
        firsts = [sum(count for _, count in self.SHAPES[:number]) for number, _, _ in chosen]
        size = self.shape.block_size
        starts = [self.SHAPES[number][0] + skip for number, skip, _ in chosen]
        tables = [
            block
            for (number, _, count), start in zip(chosen, starts, strict=True)
            for block in self.tables[number][: -(-(start + count) // size)]
        ]
        qkv = torch.cat(
            [
                self.qkv[first + skip : first + skip + count]
                for (_, skip, count), first in zip(chosen, firsts, strict=True)
            ]
        )
        batch = Batch(
            tokens=int32([0] * len(qkv)),
            starts=int32(starts),
            counts=int32([count for _, _, count in chosen]),
            tables=int32(tables),
            wanted=int32([]),
        )
        mix = model.attention(batch, Pool(pool.data_ptr(), len(pool)), 1, qkv.numpy())
        return torch.from_numpy(mix), pool

    @functools.cached_property
    def exact(self) -> Tensor:
        return torch.cat([self._exact(number) for number in range(len(self.SHAPES))])

    def _exact(self, number: int) -> Tensor:
        """Dense attention of one whole request in float64, on operands rounded as stored."""
        (start, count), shape = self.SHAPES[number], self.shape
        first = sum(count for _, count in self.SHAPES[:number])
        heads = self.qkv[first : first + count].view(count, -1, shape.head_dim)
        angles = rope_angles(512, shape.head_dim)[start : start + count].unsqueeze(1)
        low, high = heads.chunk(2, dim=-1)
        cosine, sine = angles[:, :, 0], angles[:, :, 1]
        turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
        q, k, _ = turned.to(self.dtype).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        v = heads[:, -shape.kv_heads :].to(self.dtype)
        group = shape.heads // shape.kv_heads
        keys, values = (
            torch.cat((past, new)).double().repeat_interleave(group, dim=1)
            for past, new in zip(self.past[number], (k, v), strict=True)
        )
        scores = torch.einsum("thd,nhd->htn", q.double(), keys) * shape.head_dim**-0.5
        at, of = torch.arange(start, start + count)[:, None], torch.arange(len(keys))[None]
        hidden = (of > at) | (of <= at - (shape.window or 1 << 30))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htn,nhd->thd", weights, values).flatten(1)


@functools.cache
def scene_of(dtype: torch.dtype, window: int, sizes: Sizes) -> Scene:
    return Scene(dtype, window, sizes)


def sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> Sizes:
    return tuple(locals().items())


WHOLE = [(number, 0, count) for number, (_, count) in enumerate(Scene.SHAPES)]
SIZES = [
    *(sizes(9, 3, 64, 16), sizes(4, 4, 40, 24), sizes(4, 1, 128, 128), sizes(2, 1, 6, 1)),
    sizes(6, 6, 256, 16),  # more keys than are packed between two meetings
]


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_of_mixed_rows_is_dense_attention(
    variant: Variant, dtype: torch.dtype, heads: Sizes
) -> None:
    for window in (0, 1, 130):
        scene = scene_of(dtype, window, heads)
        model = scene.model(variant)
        got, _ = scene.attend(model, WHOLE)
        assert_near(got, scene.exact, dtype)
        model.close()


@pytest.mark.parametrize("heads", [*SIZES, sizes(8, 1, 96, 16), sizes(10, 2, 64, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_attends_alike_alone_in_a_batch_and_in_any_chunk(
    variant: Variant, dtype: torch.dtype, heads: Sizes
) -> None:
    """Few rows meet keys as they lie in the pool, many meet them packed: the same sums."""
    scene = scene_of(dtype, 130, heads)
    model = scene.model(variant)
    whole, pool = scene.attend(model, WHOLE)
    first = sum(count for _, count in Scene.SHAPES[:5])
    for head in (1, 40, 64, 199):  # a request of 200 tokens, cut in two; the first part alone
        got, _ = scene.attend(model, [(6, 0, 1), (5, 0, head), (2, 0, 1)])
        assert torch.equal(got[1 : 1 + head], whole[first : first + head]), head
    for start, count in ((0, 1), (63, 2), (150, 50), (199, 1)):  # what came before is in the pool
        got, after = scene.attend(model, [(5, start, count)], before=pool)
        assert torch.equal(got, whole[first + start : first + start + count]), start
        assert torch.equal(after.view(torch.uint8), pool.view(torch.uint8))
    model.close()


def test_what_does_not_exist_is_refused_before_anything_is_written() -> None:
    model, _ = random_model(LIBRARY, shape_of(), Variant.PORTABLE)
    pool = torch.full((2, 1, 2, 1, 16, 40), torch.nan)
    good = {"tokens": [3], "starts": [17], "counts": [1], "tables": [1, 0], "wanted": [0]}
    bad = {
        "vocabulary": {"tokens": [101]},
        "rope table": {"starts": [64], "tables": [0] * 5},
        "not in the step": {"wanted": [1]},
        "outside the pool": {"tables": [0, 2]},
        "have 1 entries of 2": {"tables": [0]},
    }
    for message, change in bad.items():
        fields = {name: int32(values) for name, values in {**good, **change}.items()}
        with pytest.raises(NativeError, match=message):
            model.step(Batch(**fields), Pool(pool.data_ptr(), 2))
    assert pool.isnan().all()
    with pytest.raises(NativeError, match="not in this shape"):
        model.set(Slot.DOWN, 0, 0, (45, 70))
    model.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are placed on Linux only")
def test_threads_whose_processor_is_taken_give_the_same_and_keep_their_freedom() -> None:
    """Others wait for such a thread, and bring it to a processor that is free."""
    model, _ = random_model(LIBRARY, shape_of(hidden=512, vocab=2048), VARIANTS[-1], threads=2)
    x = randn(200, 512, seed=3).numpy()
    quiet = torch.from_numpy(model.linear(Slot.HEAD, 0, x))
    free = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert torch.equal(torch.from_numpy(model.linear(Slot.HEAD, 0, x)), quiet)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")] == free
    model.close()


def test_threads_end_with_their_model() -> None:
    before = len(os.listdir("/proc/self/task"))
    model, _ = random_model(LIBRARY, shape_of(), Variant.PORTABLE, threads=4)
    assert len(os.listdir("/proc/self/task")) == before + 3
    model.close()
    model.close()
    assert len(os.listdir("/proc/self/task")) == before
