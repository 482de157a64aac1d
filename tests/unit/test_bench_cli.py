"""`kvrelay bench engine` from the command line, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.tinymodel import write_tiny_model
from typer.testing import CliRunner

from kvrelay.services import cli
from kvrelay.services.bench import machine
from kvrelay.services.bench.cases import CASES


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KVRELAY_CONFIG", raising=False)
    monkeypatch.setattr(machine, "FAR_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "PRODUCT_WIDTH", 64)
    return str(write_tiny_model(tmp_path / "tiny"))


def test_a_run_prints_one_row_per_case_and_the_costs(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "bench engine --rounds 1 --cases decode_b4,prefill_512 --json --costs --threads 1"
    monkeypatch.setattr(sys, "argv", ["kvrelay", *arguments.split(), "--model", tiny])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert [row["case"] for row in report["rows"]] == ["prefill_512", "decode_b4"]
    for row in report["rows"]:
        assert row["kvrelay_tokens_per_s"] > 0
        assert row["ratio_median"] is None
        assert sum(row["breakdown_share"].values()) == pytest.approx(1, abs=1e-3)
    assert report["machine"]["model"] == tiny
    assert report["machine"]["gflop_per_s"] > 0
    costs = {(cost["context"], cost["batch"]): cost["step_ms"] for cost in report["costs"]}
    assert len(costs) == 28
    assert costs[128, 64] > 0
    assert costs[8000, 1] is None, "the model has 2048 positions"
    assert "round 1: decode_b4 on kvrelay (" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cases decode_b7", "error: cases: decode_b7 is not one of prefill_512, prefill_2048, "),
        ("--peer ollama", "error: peer: ollama is not one of vllm, llamacpp, native-amx, "),
        ("--peer vllm", "error: peer: vllm is not in "),
        ("--rounds 0", "error: --rounds is '0': input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: str,
    message: str,
    tiny: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["kvrelay", "bench", "engine", "--model", tiny, *arguments.split()]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(message)


def test_help_names_every_case() -> None:
    text = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", "engine", "--help"]).output
    assert [case.name for case in CASES if case.name not in text] == []
