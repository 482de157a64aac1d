"""What importing costs: the package loads nothing, router and command line nothing heavy."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "ucxx", "gguf", "safetensors")


def loaded_by(module: str) -> set[str]:
    """Top-level names that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, json, {module}; print(json.dumps([m.split('.')[0] for m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_package_itself_loads_nothing() -> None:
    third_party = loaded_by("kvrelay") - set(sys.stdlib_module_names) - loaded_by("sys")
    assert third_party == {"kvrelay"}


@pytest.mark.parametrize(
    "module",
    ["kvrelay.services.cli", "kvrelay.shared.worker.config", "kvrelay.services.router.app"],
)
def test_a_light_module_loads_nothing_heavy(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    assert loaded_by(module) & set(HEAVY) == set()


def test_the_command_line_loads_no_server() -> None:
    assert loaded_by("kvrelay.services.cli") & {"fastapi", "uvicorn", "grpc", "redis"} == set()


def test_the_top_level_folders_are_not_modules_of_their_own() -> None:
    """`import shared` would be a second copy of `kvrelay.shared`."""
    folders = {"services", "shared", "kernels"}
    assert loaded_by("kvrelay.shared.worker.app") & folders == set()
    assert loaded_by("kvrelay.services.router.app") & folders == set()
