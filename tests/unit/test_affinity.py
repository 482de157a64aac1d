"""The setting cpu_affinity: what it means, what is refused, and that threads obey it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvrelay.shared.config import Sources, resolve
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.worker.affinity import apply_affinity, parse_cpus
from kvrelay.shared.worker.config import WorkerConfig


def test_lists_and_ranges() -> None:
    assert parse_cpus("") == frozenset()
    assert parse_cpus(" 0-2, 4,4 ") == {0, 1, 2, 4}
    assert parse_cpus("4095") == {4095}


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "4096", "0-99999", "0;1", "1.5"])
def test_anything_else_names_setting_value_and_limit(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(WorkerConfig, Sources(env={"KVRELAY_CPU_AFFINITY": text}), {"model": "m"})
    message = str(caught.value)
    assert message.startswith(f"KVRELAY_CPU_AFFINITY is {text!r}: ")
    assert "CPUs are 0 to 4095" in message


def test_it_is_printed_and_handed_to_workers() -> None:
    flags = {"model": "m", "cpu_affinity": "0-1"}
    outcome = resolve(WorkerConfig, Sources(flags=flags))
    assert "cpu_affinity = 0-1 (--cpu-affinity)" in outcome.lines()
    assert outcome.config.to_env()["KVRELAY_CPU_AFFINITY"] == "0-1"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_cpu_that_is_not_there_is_named_and_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    usable = ",".join(map(str, sorted(before)))
    with pytest.raises(ConfigError, match=f"CPU 4095 is not one of those usable: {usable}$"):
        apply_affinity({first, 4095})
    apply_affinity(frozenset())
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_threads_that_start_later_and_their_number_obey_it() -> None:
    code = """
import os, sys, threading
from kvrelay.shared.worker.affinity import apply_affinity, parse_cpus
from kvrelay.shared.worker.config import WorkerConfig
config = WorkerConfig(model="m", cpu_affinity=sys.argv[1])
apply_affinity(parse_cpus(config.cpu_affinity))
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
print(seen[0], config.compute_threads)
"""
    last = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", code, str(last)], capture_output=True, text=True)
    assert done.stdout == f"{{{last}}} 1\n", done.stderr
