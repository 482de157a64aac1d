"""The native library under sanitizers: `python tests/sanitize.py [STEPS]`, 10,000 unless said.

Each sanitizer has its own build and process, which has its runtime loaded before Python's own.
Random mixes of prompts, chunks and decoding rows, draws of all kinds, all variants that this
processor can run, both dtypes, three threads. A finding ends the process with an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import numpy as np

from kvrelay.kernels.native.binding import Batch, Library, NativeModel, Pool, Shape, Slot, Variant
from kvrelay.kernels.native.build import build, compiler
from kvrelay.kernels.native.step import MOST_TOPS, Draw, Drawing, DrawStatus
from kvrelay.shared.sampling.edits import Edits

SANITIZERS = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter, which frees little at its end
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
BLOCK_SIZE, BLOCKS = 8, 256


def random_model(library: Library, variant: Variant, dtype: int) -> NativeModel:
    """Two layers with all that a family may have: biases, norms of heads, a window, a head."""
    shape = Shape(2, 70, 45, 6, 2, 24, 101, BLOCK_SIZE, 20 * dtype, dtype, 0, 1, 1, 1e-5)
    model = NativeModel(library, shape, variant, threads=3)
    draw = np.random.default_rng(0)
    matrices = {
        Slot.EMBED: (101, 70),
        Slot.HEAD: (101, 70),
        Slot.Q: (144, 70),
        Slot.K: (48, 70),
        Slot.V: (48, 70),
        Slot.ATTENTION_OUT: (70, 144),
        Slot.GATE: (45, 70),
        Slot.UP: (45, 70),
        Slot.DOWN: (70, 45),
    }
    vectors = {
        Slot.NORM: 70,
        Slot.ATTENTION_NORM: 70,
        Slot.MLP_NORM: 70,
        Slot.Q_NORM: 24,
        Slot.K_NORM: 24,
        Slot.Q_BIAS: 144,
        Slot.K_BIAS: 48,
        Slot.V_BIAS: 48,
    }
    for layer in range(2):
        for slot, size in matrices.items():
            wide = draw.standard_normal(size, np.float32) / 8
            stored = (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype else wide
            model.set(slot, layer, stored.ctypes.data, size)
        for slot, width in vectors.items():
            vector = draw.standard_normal((1, width), np.float32)
            model.set(slot, layer, vector.ctypes.data, (1, width))
    model.set_rope(np.ones((512, 2, 12), np.float32))
    return model


def random_batch(draw: np.random.Generator) -> Batch:
    starts: list[int] = []
    counts: list[int] = []
    entries = 0
    for _ in range(int(draw.integers(1, 6))):
        start, count = int(draw.integers(0, 150)), int(draw.choice([1, 1, 1, 2, 9, 40, 130]))
        entries += -(-(start + count) // BLOCK_SIZE)
        starts.append(start)
        counts.append(count)
    tokens = draw.integers(0, 101, sum(counts))
    # At times every position: more logits than are computed at a time.
    wanted = np.cumsum(counts) - 1 if draw.integers(3) else np.arange(len(tokens))
    tables = draw.permutation(BLOCKS)[:entries]
    arrays = (tokens, np.array(starts), np.array(counts), tables, wanted)
    return Batch(*(np.ascontiguousarray(array, np.int32) for array in arrays))


def random_edits(draw: np.random.Generator) -> Edits:
    def ids() -> array[int]:
        return array("i", draw.permutation(np.arange(-2, 110))[: draw.integers(0, 100)].tolist())

    known, biased = ids(), ids()
    masks = [draw.integers(0, 2**32, 4, np.uint32) for _ in range(int(draw.integers(0, 3)))]
    times = draw.integers(0, 5, len(known))
    pairs = np.stack([np.asarray(known), times], axis=1).ravel()
    bias = array("d", draw.standard_normal(len(biased)).tolist())
    return Edits(1.2, 0.5, 0.1, array("i", pairs.tolist()), biased, bias, masks)


def random_draws(draw: np.random.Generator, count: int) -> list[Draw]:
    return [
        Draw(
            temperature=float(draw.choice([0, 0.01, 0.8, 3])),
            top_p=float(draw.choice([1, 0.95, 0.5, 0])),
            min_p=float(draw.choice([0, 0, 0.3])),
            seed=int(draw.integers(2**63)),
            choice=0,
            output_index=int(draw.integers(1000)),
            top_k=int(draw.choice([0, 1, 2, 20, 101])),
            limit=int(draw.integers(90, 102)),
            given=int(draw.choice([-1, -1, 0, 89])),
            tops=int(draw.choice([-1, -1, 0, 3, MOST_TOPS])),
            banned=draw.integers(0, 110, int(draw.integers(0, 4))).tolist(),
            edits=random_edits(draw) if draw.integers(2) else None,
        )
        for _ in range(count)
    ]


def run_steps(file: Path, steps: int) -> None:
    library = Library(file)
    draw = np.random.default_rng(1)
    for variant in library.variants:
        for dtype in (0, 1):
            model = random_model(library, variant, dtype)
            pool = np.zeros((BLOCKS, 2, 2, 2, BLOCK_SIZE, 24), np.uint16 if dtype else np.float32)
            for _ in range(steps // (2 * len(library.variants))):
                batch = random_batch(draw)
                draws = random_draws(draw, len(batch.wanted))
                place = Pool(pool.ctypes.data, BLOCKS)
                drawing = Drawing(draws)
                model.step_and_draw(batch, place, drawing, alone=not draw.integers(4))
                assert {*drawing.statuses} <= {DrawStatus.DRAWN, DrawStatus.NOTHING}
            model.close()


def main(steps: int) -> int:
    """Builds and runs each sanitizer; the number of those that found something."""
    failed = 0
    for sanitizer, runtimes in SANITIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = (f"-fsanitize={sanitizer}", "-g", "-O1", "-fno-omit-frame-pointer")
            file = build(Path(folder, "libsanitized.so"), extra=flags)
            found = [
                subprocess.run(
                    [*compiler(), f"-print-file-name={name}"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.strip()
                for name in runtimes
            ]
            command = [sys.executable, __file__, str(steps), str(file)]
            environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found)}
            code = subprocess.run(command, env=environment, check=False).returncode
        sys.stdout.write(f"{sanitizer}: {steps} steps, {'FAILED' if code else 'nothing found'}\n")
        failed += code != 0
    return failed


if __name__ == "__main__":
    wanted_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    if len(sys.argv) > 2:
        run_steps(Path(sys.argv[2]), wanted_steps)
    else:
        sys.exit(main(wanted_steps))
