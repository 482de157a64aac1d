"""What loading takes: the weights as they are computed with, once, and little beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tests.native import open_library
from tests.tinymodel import write_tiny_model
from tests.unit.test_weights import write_gguf

open_library()
SLACK_BYTES = 24 << 20
"""Pieces on their way and what the allocator keeps: less than one of the large tensors."""
CHILD = """
import json, sys
from pathlib import Path
from kvrelay.kernels.native.binding import Library
from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.model.native import NativeKernels, load_native
from kvrelay.shared.model.weights import open_weights

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

source = resolve_model(sys.argv[1])
config = read_config(source)
library = Library()
layout = KVLayout(config.layers, config.kv_heads, config.head_dim, 16, "bfloat16")
kernels = NativeKernels(library, library.variants[-1], 2)
weights = open_weights(source, config)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
model = load_native(weights, config, layout, kernels, positions=128)
left, peak = status("VmRSS"), status("VmHWM")  # in this order: reading takes memory too
print(json.dumps([peak - before, left - before, "torch" in sys.modules]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_no_tensor_is_held_twice_and_torch_is_not_needed(tmp_path: Path, form: str) -> None:
    model = write_tiny_model(
        tmp_path / "folder", layers=1, hidden_size=2048, intermediate_size=4096
    )
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2  # as bfloat16
    if form == "gguf":
        kind = gguf.GGMLQuantizationType.Q8_0
        model = write_gguf(model, tmp_path / "m.gguf", kind=kind, arch="llama")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model)], stdout=subprocess.PIPE, text=True, check=True
    )
    peak, left, torch_loaded = json.loads(done.stdout)
    print(f"{stored >> 20} MiB of weights: peak {peak >> 20}, then {left >> 20} MiB")
    assert not torch_loaded
    assert stored * 0.9 < left <= peak < stored + SLACK_BYTES
