"""A checkpoint's tensors go piece by piece into the native library, which alone keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvrelay.kernels.native.binding import Library, NativeModel, Shape, Slot, Variant
from kvrelay.shared.checkpoint.config import ModelConfig
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.model.pieces import widened
from kvrelay.shared.model.reader import EMBEDDING, HEAD, Progress, TensorReader
from kvrelay.shared.model.rope import rope_table
from kvrelay.shared.model.weights import Weights


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Which code computes, and with how many threads."""

    library: Library
    variant: Variant
    threads: int


def load_native(
    weights: Weights,
    config: ModelConfig,
    layout: KVLayout,
    kernels: NativeKernels,
    *,
    positions: int,
    progress: Progress | None = None,
) -> NativeModel:
    """Build the model in the dtype of the layout, with rope for `positions` positions.

    Tensors are read by as many threads as compute later; each holds a piece of one at a time.

    Raises `ModelError` naming the tensor that is missing, misshapen, not finite or not understood,
    and `NativeError` without memory for the weights.
    """
    reader = TensorReader(weights, layout.dtype, progress)
    tied = reader.shares_head(config.tied_head)
    model = NativeModel(
        kernels.library, _shape(config, layout, tied), kernels.variant, kernels.threads
    )
    places = [*_ends(config, tied)]
    for number in range(config.layers):
        places += _of_layer(config, number)
    with ThreadPoolExecutor(kernels.threads, "load") as pool:
        # The first failure cancels what has not begun.
        for _ in pool.map(lambda place: _fill(model, reader, place), places):
            pass
    factors = None
    if "rope_freqs.weight" in weights.shapes:
        factors = reader.floats("rope_freqs.weight", config.head_dim // 2)
    reader.finish()
    model.set_rope(rope_table(config, positions, factors))
    return model


def _shape(config: ModelConfig, layout: KVLayout, tied: bool) -> Shape:
    return Shape(
        layers=config.layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        block_size=layout.block_size,
        window=config.sliding_window or 0,
        dtype=int(layout.dtype == "bfloat16"),
        tied=int(tied),
        qkv_bias=int(config.qkv_bias),
        qk_norm=int(config.qk_norm),
        rms_eps=config.rms_eps,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the checkpoint goes."""

    slot: Slot
    layer: int
    name: str
    shape: tuple[int, ...]


def _ends(config: ModelConfig, tied: bool) -> Iterator[_Place]:
    """What there is once; the largest tensors come first, so that no thread ends long after."""
    table = (config.vocab, config.hidden)
    yield _Place(Slot.EMBED, 0, EMBEDDING, table)
    if not tied:
        yield _Place(Slot.HEAD, 0, HEAD, table)
    yield _Place(Slot.NORM, 0, "model.norm.weight", (config.hidden,))


def _of_layer(config: ModelConfig, number: int) -> Iterator[_Place]:
    hidden, wide = config.hidden, config.intermediate
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[Slot, tuple[str, tuple[int, ...]]] = {
        Slot.Q: ("self_attn.q_proj.weight", (q_rows, hidden)),
        Slot.K: ("self_attn.k_proj.weight", (kv_rows, hidden)),
        Slot.V: ("self_attn.v_proj.weight", (kv_rows, hidden)),
        Slot.ATTENTION_OUT: ("self_attn.o_proj.weight", (hidden, q_rows)),
        Slot.GATE: ("mlp.gate_proj.weight", (wide, hidden)),
        Slot.UP: ("mlp.up_proj.weight", (wide, hidden)),
        Slot.DOWN: ("mlp.down_proj.weight", (hidden, wide)),
        Slot.ATTENTION_NORM: ("input_layernorm.weight", (hidden,)),
        Slot.MLP_NORM: ("post_attention_layernorm.weight", (hidden,)),
    }
    if config.qk_norm:
        shapes[Slot.Q_NORM] = ("self_attn.q_norm.weight", (config.head_dim,))
        shapes[Slot.K_NORM] = ("self_attn.k_norm.weight", (config.head_dim,))
    if config.qkv_bias:
        shapes[Slot.Q_BIAS] = ("self_attn.q_proj.bias", (q_rows,))
        shapes[Slot.K_BIAS] = ("self_attn.k_proj.bias", (kv_rows,))
        shapes[Slot.V_BIAS] = ("self_attn.v_proj.bias", (kv_rows,))
    for slot, (name, shape) in shapes.items():
        yield _Place(slot, number, f"model.layers.{number}.{name}", shape)


def _fill(model: NativeModel, reader: TensorReader, place: _Place) -> None:
    """Hand over a tensor, and forget it. Vectors are rounded as matrices are, and then float32."""
    for piece in reader.pieces(place.name, *place.shape):
        if len(place.shape) == 1 and piece.dtype == np.uint16:
            piece = widened(piece.view(np.uint16))
        dense = np.ascontiguousarray(piece)
        model.set(place.slot, place.layer, dense.ctypes.data, dense.shape)
