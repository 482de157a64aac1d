"""Models of random weights inside the native library, for its tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from kvrelay.kernels.native.binding import (
    Library,
    NativeError,
    NativeModel,
    Shape,
    Slot,
    Variant,
)


def open_library() -> Library:
    """The built library, or a skip of the whole module that says why."""
    try:
        return Library()
    except NativeError as error:
        pytest.skip(str(error), allow_module_level=True)


def shape_of(**sizes: float) -> Shape:
    """One small layer, of odd sizes wherever they may be odd."""
    return Shape(
        **{
            "layers": 1,
            "hidden": 70,
            "intermediate": 45,
            "heads": 3,
            "kv_heads": 1,
            "head_dim": 40,
            "vocab": 101,
            "block_size": 16,
            "dtype": 0,
            "tied": 1,
            "rms_eps": 1e-5,
            **sizes,
        }
    )


def dtype_of(shape: Shape) -> torch.dtype:
    return torch.bfloat16 if shape.dtype else torch.float32


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rope_angles(positions: int, dim: int) -> Tensor:
    """[P, 2, D/2]: cosines and sines of any angles."""
    angles = randn(positions, dim // 2, seed=99) * 2
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def random_model(
    library: Library, shape: Shape, variant: Variant, threads: int = 2, positions: int = 64
) -> tuple[NativeModel, Mapping[Slot, Tensor]]:
    """The model, and its matrices of layer 0 (in float64, as they were rounded)."""
    model = NativeModel(library, shape, variant, threads)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        Slot.EMBED: (shape.vocab, shape.hidden),
        Slot.Q: (q, shape.hidden),
        Slot.K: (kv, shape.hidden),
        Slot.V: (kv, shape.hidden),
        Slot.ATTENTION_OUT: (shape.hidden, q),
        Slot.GATE: (shape.intermediate, shape.hidden),
        Slot.UP: (shape.intermediate, shape.hidden),
        Slot.DOWN: (shape.hidden, shape.intermediate),
    }
    tensors = {
        slot: randn(*size, seed=slot).to(dtype_of(shape)) / 8 for slot, size in sizes.items()
    }
    if not shape.tied:
        tensors[Slot.HEAD] = randn(shape.vocab, shape.hidden, seed=50).to(dtype_of(shape)) / 8
    vectors = {Slot.Q_BIAS: q, Slot.K_BIAS: kv, Slot.V_BIAS: kv} if shape.qkv_bias else {}
    tensors |= {slot: randn(1, width, seed=slot) for slot, width in vectors.items()}
    for slot, tensor in tensors.items():
        model.set(slot, 0, tensor.data_ptr(), (tensor.shape[0], tensor.shape[1]))
    model.set_rope(rope_angles(positions, shape.head_dim).numpy())
    return model, {slot: tensor.double() for slot, tensor in tensors.items()}


def int32(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)
