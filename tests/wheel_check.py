"""Checks on built artefacts: `python tests/wheel_check.py DIST` installs the wheel and looks.

One top-level name, every source file of the tree, and imports that work without the heavy packages.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("services", "shared", "kernels")
SHIPPED = ("*.py", "*.pyi", "*.lua", "*.proto", "*.html", "*.js", "*.css", "*.cpp", "*.h")
BLOCKED = ("torch", "transformers", "ucxx", "triton", "gguf", "safetensors")
IMPORTS = (
    "kvrelay",
    "kvrelay.shared.config",
    "kvrelay.services.cli",
    "kvrelay.services.router.app",
)
ENTRY_POINT = "kvrelay = kvrelay.services.entry:process"


def expected_files() -> set[str]:
    """Of the wheel, without its metadata."""
    sources = {p for folder in FOLDERS for s in SHIPPED for p in (ROOT / folder).rglob(s)}
    names = {f"kvrelay/{p.relative_to(ROOT).as_posix()}" for p in sources}
    return names | {"kvrelay/__init__.py", "kvrelay/py.typed"}


def check_wheel(wheel: Path) -> list[str]:
    """What is wrong with the wheel's contents."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next((n for n in names if n.endswith("entry_points.txt")), None)
        scripts = archive.read(entry_points).decode() if entry_points else ""
    files = {n for n in names if ".dist-info/" not in n}
    problems = [f"missing: {n}" for n in sorted(expected_files() - files)]
    problems += [f"top-level name: {n}" for n in sorted(n for n in files if "kvrelay" not in n[:7])]
    problems += [] if ENTRY_POINT in scripts else ["no `kvrelay` command"]
    problems += [] if any("/LICENSE" in n for n in names) else ["no LICENSE"]
    return problems


def check_imports(wheel: Path) -> list[str]:
    """Which modules cannot be imported from the wheel alone when the heavy packages are absent."""
    block = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for module in IMPORTS:
            code = (
                f"{block}; sys.path.insert(0, {folder!r}); import {module} as m; print(m.__file__)"
            )
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0 or folder not in done.stdout:
                problems.append(f"import {module}: {(done.stderr or done.stdout).strip()[-400:]}")
    return problems


def check_sdist(sdist: Path) -> list[str]:
    """What a source distribution must carry to be built and tested."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "shared/types.py")
    return [f"sdist lacks {name}" for name in wanted if name not in names]


def main(dist: Path) -> int:
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    problems = check_wheel(wheel) + check_sdist(sdist) + check_imports(wheel)
    sys.stdout.write("\n".join(problems or [f"{wheel.name}: {len(expected_files())} files"]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
