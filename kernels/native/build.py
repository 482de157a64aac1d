"""Compiles the shared libraries: `python kernels/native/build.py`, and as part of each install.

The same sources are compiled once for each kind of processor, and the library chooses between them
when it runs. Standard library only: the package's build runs this before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libkvrelay_kernels.so"
REST = FOLDER.parents[1] / "shared" / "store" / "rest.cpp"
"""Renews the lease of a process that rests: a library of its own, as the router needs it too."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
"""No contraction: a product and a sum are fused only where the source says so."""
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")
AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16"))
VARIANTS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512bf16": ("-mfma", "-mprefer-vector-width=512", *AVX512),
    "amx": ("-mfma", "-mprefer-vector-width=512", *AVX512, "-mamx-tile", "-mamx-bf16", "-mprfchw"),
}


class BuildFailed(Exception):
    """No compiler, or one that could not compile the sources; the message says which."""


def compiler() -> list[str]:
    """`$CXX`, or the first usual one that is there. Raises `BuildFailed`."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    raise BuildFailed("no C++ compiler ($CXX, g++, clang++, c++)")


def variants_of(machine: str) -> list[str]:
    """Those that can be compiled for it; the portable one for every machine."""
    return list(VARIANTS) if machine in ("x86_64", "AMD64") else ["portable"]


def build(
    output: Path = LIBRARY, extra: tuple[str, ...] = (), machine: str = platform.machine()
) -> Path:
    """Compile into `output`, which is replaced whole. Raises `BuildFailed`."""
    cxx = compiler()
    flags = [*FLAGS, *WARNINGS, *extra]
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made: list[Path] = []
        commands: list[list[str]] = []

        def compile_into(name: str, source: Path, *special: str) -> None:
            made.append(Path(folder, f"{name}.o"))
            commands.append([*cxx, *flags, *special, "-c", str(source), "-o", str(made[-1])])

        for name in variants_of(machine):
            entry = f"-DVARIANT=kvr_run_{name}"
            compile_into(name, FOLDER / "variant.cpp", entry, *VARIANTS[name])
        for source in sorted(FOLDER.glob("*.cpp")):
            if source.name != "variant.cpp":
                compile_into(source.stem, source)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder, output.name)
        _run([*cxx, *flags, "-shared", *map(str, made), "-o", str(linked)])
        linked.replace(output)
    return output


def build_rest() -> Path:
    """Raises `BuildFailed`."""
    library = REST.with_name("librest.so")
    with tempfile.TemporaryDirectory(dir=REST.parent) as folder:
        made = Path(folder, library.name)
        _run([*compiler(), *FLAGS, *WARNINGS, "-shared", str(REST), "-o", str(made)])
        made.replace(library)
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    for made in (build(extra=tuple(sys.argv[1:])), build_rest()):
        sys.stdout.write(f"{made}\n")
