"""The soak in short: 300 requests while everything around them is hurt; each ends right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system

PLANS = Path(__file__).parents[2] / "loadtests" / "chaos"


def chaos(plan: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the report, what was said besides)."""
    command = [sys.executable, "-m", "kvrelay.services.cli", "chaos", str(PLANS / plan)]
    done = subprocess.run(
        [*command, "--tiny", "--json", *flags], capture_output=True, text=True, timeout=110
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_300_requests_end_once_and_right_while_workers_router_and_redis_go() -> None:
    code, found, said = chaos("short.yaml", "--requests", "300", "--over", "30")
    print(json.dumps({k: v for k, v in found.items() if k != "growth"}))
    assert (code, found["complaints"], said) == (0, [], "")
    assert found["wrong"] == found["ended_twice"] == found["never_ended"] == []
    assert sum(found["ends"].values()) == 300
    assert found["ends"]["left"] > 20, "clients did leave"
    assert found["full_share"] >= 0.995
    assert found["leaked_blocks"] == 0 and found["gauges_off"] == {}
    kinds = {name.split()[0] for name in found["actions"]}
    assert {"restart", "stop", "kill"} <= kinds
    assert {"restart router", "stop redis", "kill redis"} <= set(found["actions"])
    assert sum(found["actions"].values()) >= 6, "workers were hurt, too"


def test_faults_on_the_wire_are_counted_and_cost_no_answer() -> None:
    code, found, _ = chaos("transfer.yaml", "--requests", "200")
    print(json.dumps({k: v for k, v in found.items() if k != "growth"}))
    assert (code, found["complaints"]) == (0, [])
    injected = {name for name in found["faults"] if name.startswith("chaos_injected_total")}
    assert len(injected) > 5, "faults of many kinds"
    assert found["faults"]['transfer_faults_total{kind="corrupt"}'] > 0
