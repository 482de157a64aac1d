"""Each op against plain arithmetic, and the law that a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.attention.reference import attention
from kvrelay.kernels.attention.schedule import PagedRow, schedule
from kvrelay.kernels.embedding.reference import embedding
from kvrelay.kernels.linear.reference import ROW_TILE, linear, pack
from kvrelay.kernels.rms_norm.reference import rms_norm
from kvrelay.kernels.rope.reference import Slots, rope_write
from kvrelay.kernels.silu_mul.reference import silu_mul

DTYPES = [torch.bfloat16, torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(7, 9), (64, 176), (96, 64), (515, 576)])
def test_linear_rows_do_not_depend_on_neighbours_place_or_threads(
    dtype: torch.dtype, out: int, width: int
) -> None:
    weight, bias = randn(out, width, dtype=dtype), randn(out, dtype=dtype, seed=1)
    packed = pack(weight, bias)
    row = randn(1, width, dtype=dtype, seed=2)
    alone = linear(row, packed)
    exact = functional.linear(row.double(), weight.double(), bias.double())
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(alone.double(), exact, rtol=tolerance, atol=tolerance)
    threads = torch.get_num_threads()
    for rows in (2, ROW_TILE, ROW_TILE + 1, 3 * ROW_TILE):
        for neighbour in (0.0, 3.0, torch.nan, torch.inf):
            for place in {0, rows // 2, rows - 1}:
                x = torch.full((rows, width), neighbour, dtype=dtype)
                x[place] = row
                torch.set_num_threads(1 + place % 3)
                assert torch.equal(linear(x, packed)[place], alone[0]), (rows, neighbour, place)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_transformers_formula_row_by_row(dtype: torch.dtype) -> None:
    x, weight = randn(37, 100, dtype=dtype), randn(100, dtype=dtype, seed=1)
    got = rms_norm(x, weight, 1e-5)
    wide = x.double()
    exact = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(torch.cat([rms_norm(row[None], weight, 1e-5) for row in x]), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 88, 1537])
def test_silu_mul_rows_do_not_depend_on_neighbours_or_threads(
    dtype: torch.dtype, width: int
) -> None:
    gate_up = randn(44, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    got = silu_mul(gate_up)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        got.double(), functional.silu(gate) * up, rtol=tolerance, atol=tolerance
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(7)  # cuts the whole, not the rows, at odd places
    got = silu_mul(gate_up)
    torch.set_num_threads(1)
    assert torch.equal(torch.cat([silu_mul(row[None]) for row in gate_up]), got)
    torch.set_num_threads(threads)


def test_silu_mul_leaves_its_input_alone() -> None:
    gate_up = randn(2, 8)
    before = gate_up.clone()
    silu_mul(gate_up)
    assert torch.equal(gate_up, before)


def test_embedding_takes_rows_and_refuses_ids_outside() -> None:
    table = randn(5, 3)
    assert torch.equal(embedding(torch.tensor([4, 0, 4]), table), table[[4, 0, 4]])
    with pytest.raises((IndexError, RuntimeError)):
        embedding(torch.tensor([5]), table)


def test_rope_write_turns_pairs_and_fills_exactly_the_slots() -> None:
    kv = torch.full((3, 2, 1, 4, 4), torch.nan)
    angles = torch.tensor([[0.0, 0.0], [0.5, 0.25]])
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    q, k, v = randn(2, 2, 4), randn(2, 1, 4, seed=1), randn(2, 1, 4, seed=2)
    at = Slots(torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([3, 1]))
    turned = rope_write(q, k, v, table, kv, at)

    assert torch.equal(turned[0], q[0])
    pairs = torch.complex(k[1, 0, :2], k[1, 0, 2:]) * torch.polar(torch.ones(2), angles[1])
    torch.testing.assert_close(kv[0, 0, 0, 1], torch.cat((pairs.real, pairs.imag)))
    assert torch.equal(kv[2, 0, 0, 3], k[0, 0])
    assert torch.equal(kv[2, 1, 0, 3], v[0, 0])
    assert torch.equal(kv[0, 1, 0, 1], v[1, 0])
    assert int(kv.isfinite().sum()) == 16


def dense(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """q [T, Hq, D] at start.. over keys and values [N, Hk, D], in float64."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(repeat, dim=1) for each in (keys, values))
    scores = torch.einsum("thd,nhd->htn", q.double(), keys) * q.shape[2] ** -0.5
    at, of = torch.arange(start, start + len(q))[:, None], torch.arange(len(keys))[None]
    hidden = of > at if window is None else (of > at) | (of <= at - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, values)


@pytest.mark.parametrize("window", [None, 1, 5, 130, 200])
@pytest.mark.parametrize(
    ("heads", "heads_k", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 20, 32), (8, 1, 128, 128), (2, 1, 6, 1)],
)
def test_attention_of_mixed_rows_is_dense_attention(
    heads: int, heads_k: int, dim: int, block_size: int, window: int | None
) -> None:
    shapes = [(0, 1), (0, 5), (127, 1), (128, 1), (130, 3), (64, 200), (300, 1), (257, 33)]
    blocks = [-(-(start + count) // block_size) for start, count in shapes]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)).tolist()
    pool = torch.full((sum(blocks) + 1, 2, 2, heads_k, block_size, dim), torch.nan)
    rows, expected = [], []
    q = randn(sum(count for _, count in shapes), heads, dim)
    first = 0
    for number, (start, count) in enumerate(shapes):
        table = [order.pop() for _ in range(blocks[number])]
        kv = randn(2, start + count, heads_k, dim, seed=number + 1)
        for at in range(start + count):
            pool[table[at // block_size], 1, :, :, at % block_size] = kv[:, at]
        rows.append(PagedRow(start, count, [*table, 10**9]))
        expected.append(dense(q[first : first + count], kv[0], kv[1], start, window))
        first += count
    got = attention(q, pool, 1, schedule(rows, block_size, window), dim**-0.5)
    torch.testing.assert_close(got.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("heads", "heads_k", "dim"), [(9, 3, 64), (1, 1, 64), (8, 2, 128)])
def test_a_token_attends_alike_alone_in_a_batch_and_in_any_chunk(
    heads: int, heads_k: int, dim: int, window: int | None
) -> None:
    length, threads = 421, torch.get_num_threads()
    blocks = list(range(27))
    pool = randn(27, 1, 2, heads_k, 16, dim)
    q = randn(length, heads, dim, seed=1)
    whole = attention(q, pool, 0, schedule([PagedRow(0, length, blocks)], 16, window), dim**-0.5)
    for number, (start, count) in enumerate(
        [(0, 1), (3, 2), (127, 1), (128, 1), (126, 5), (400, 1), (420, 1), (255, 166), (17, 300)]
    ):
        torch.set_num_threads(1 + number % 3)
        rows = [PagedRow(start, count, blocks), PagedRow(7, 260, blocks), PagedRow(399, 1, blocks)]
        for chosen in (rows[:1], rows, rows[::-1]):
            batch = torch.cat([q[row.start : row.start + row.count] for row in chosen])
            got = attention(batch, pool, 0, schedule(chosen, 16, window), dim**-0.5)
            first = 0 if chosen[0] is rows[0] else len(batch) - count
            assert torch.equal(got[first : first + count], whole[start : start + count])
    torch.set_num_threads(threads)


def test_a_block_size_that_does_not_divide_the_key_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="block size 48 does not divide the key tile of 128"):
        schedule([PagedRow(0, 1, [0])], 48)
