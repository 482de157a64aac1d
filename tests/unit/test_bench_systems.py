"""Systems as processes, and kvrelay's own driver on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tinymodel import write_tiny_model

from kvrelay.services.bench.config import BenchConfig
from kvrelay.services.bench.drivers.kvrelay_driver import KvrelaySystem, open_system
from kvrelay.services.bench.drivers.serve import measure
from kvrelay.services.bench.engine import specs_of
from kvrelay.services.bench.errors import BenchError
from kvrelay.services.bench.systems import (
    RunningSystem,
    SystemSpec,
    peer_environment,
    peer_python,
    running,
)
from kvrelay.shared.worker.config import WorkerConfig

DRIVER = """
import os, sys
class System:
    def __init__(self, settings):
        self.about = {"greeting": settings["greeting"], "setting": os.environ["BENCH_TEST"]}
        print("a library talks on stdout")
    def begin(self, prompts, outputs):
        self.left = list(range(len(prompts)))
    def advance(self):
        if not self.left:
            sys.exit("no memory left")
        return [self.left.pop()]
    def drop(self): pass
    def phases_s(self): return {"products": 0.0}
    def double(self, value): return {"value": 2 * value}
def open_system(settings):
    if settings["greeting"] == "none":
        raise ValueError("there is no model")
    return System(settings)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    file = tmp_path / "driver.py"
    file.write_text(DRIVER)
    return file


@pytest.fixture
def system(driver: Path, tmp_path: Path) -> Iterator[RunningSystem]:
    with running([spec(driver, "hello")], tmp_path) as (one,):
        one.load()
        yield one


def spec(driver: Path, greeting: str) -> SystemSpec:
    settings, environment = {"greeting": greeting}, {"BENCH_TEST": "set"}
    return SystemSpec("testee", Path(sys.executable), str(driver), settings, environment)


def test_a_system_answers_whatever_its_libraries_print(system: RunningSystem) -> None:
    assert system.about == {"greeting": "hello", "setting": "set"}
    assert system.ask("double", value=21) == {"value": 42}
    reading = system.measure([[1, 2, 3], [4]], 0)
    assert (reading.tokens, reading.steps, reading.phases_s) == (4, 2, {"products": 0.0})
    assert reading.seconds > 0


def test_a_system_that_ends_is_reported_with_its_last_words(
    system: RunningSystem, tmp_path: Path
) -> None:
    log = tmp_path / "bench-testee.log"
    with pytest.raises(BenchError) as ended:
        system.measure([[1]], 1)
    assert str(ended.value) == f"testee ended with status 1: no memory left (log: {log})"


def test_a_system_that_cannot_load_is_reported(driver: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"^testee ended with status 1: ValueError: there is no"),
        running([spec(driver, "none")], tmp_path) as (one,),
    ):
        one.load()


def test_a_peer_that_is_not_set_up_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    with pytest.raises(BenchError) as missing:
        peer_python("vllm")
    place = tmp_path / "peers/vllm"
    assert str(missing.value) == (
        f"peer: vllm is not in {place}; `loadtests/peers/setup vllm` gets it"
    )
    with pytest.raises(BenchError, match=r"^peer: ollama is not one of vllm, llamacpp, "):
        peer_python("ollama")


def test_our_other_kernels_are_peers_too(tmp_path: Path) -> None:
    config = BenchConfig(peers=("reference",))
    specs = specs_of(config, WorkerConfig(model=str(tmp_path), threads=1))
    assert [each.name for each in specs] == ["kvrelay", "kvrelay_again", "reference"]
    assert [each.settings["kernels"] for each in specs] == ["auto", "auto", "reference"]


def test_vllm_gets_as_many_cores_as_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 7, 5}, raising=False)
    assert peer_environment("vllm", 2)["VLLM_CPU_OMP_THREADS_BIND"] == "4,5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in peer_environment("llamacpp", 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> KvrelaySystem:
    folder = write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")
    settings = {"model": str(folder), "dtype": "float32", "threads": 1}
    return open_system({**settings, "kv_cache_memory_bytes": 4 << 20})


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    return [[(seed + 7 * at + 3 * i) % 500 + 3 for i in range(tokens)] for at in range(count)]


def test_our_engine_gives_each_row_a_token_in_each_measured_step(tiny: KvrelaySystem) -> None:
    reading = measure(tiny, prompts(5, 40, seed=1), 6)
    assert (reading.tokens, reading.steps) == (30, 6)
    tiny.engine.state.check()
    assert not tiny.engine.state.legs, "nothing is left running"


def test_our_engine_reads_prompts_in_chunks(tiny: KvrelaySystem) -> None:
    reading = measure(tiny, prompts(1, 700, seed=2), 0)
    assert reading.tokens == 700
    assert reading.steps >= 3, "256 tokens at most in a step"
    assert sum(reading.phases_s.values()) <= reading.seconds


def test_bare_steps_and_products_are_timed(tiny: KvrelaySystem) -> None:
    capacity = tiny.capacity.blocks * 16
    assert tiny.fill() == {"tokens": capacity}
    assert set(tiny.kv_bytes[:1024]) != {0}
    assert tiny.bare_step(batch=3, context=50, steps=3)["wall_s"] > 0
    spent = tiny.products(counts=[4, 1], logits=True, steps=3)["products_s"]
    assert (spent is None) == (not tiny.phases_s())
