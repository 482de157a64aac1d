"""The picture of a benchmark: written, and refused in time where it cannot be."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from tests.unit.test_bench_measure import decode_row

from kvrelay.services.bench.errors import BenchError
from kvrelay.services.bench.plot import draw, require_matplotlib

MACHINE = {"model": "m/tiny.gguf", "dtype": "bfloat16", "threads": 2, "processor": "some"}


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    require_matplotlib()
    file = tmp_path / "engine.png"
    draw([decode_row()], MACHINE, file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert width > 400
    assert height == 720


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"^plot: needs matplotlib; `pip install 'kvrelay\[bench"):
        require_matplotlib()
