"""Limits on the size of source files: `python tests/size_check.py` lists what breaks them.

Over 300 lines a file is mentioned, over 400 it fails. Functions, arguments and lines have their
limits in ruff's configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

SMELL_LINES, LIMIT_LINES = 300, 400
FOLDERS = ("services", "shared", "kernels", "loadtests")
GENERATED = Path("shared/rpc/gen")
BANNED_NAMES = {"utils", "common", "helpers", "misc"}


def complaints(root: Path) -> tuple[list[str], list[str]]:
    """(what fails, what is mentioned): source files that are too long or named for nothing."""
    failing: list[str] = []
    mentioned: list[str] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root)
            if GENERATED in name.parents:
                continue
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > SMELL_LINES:
                kind = failing if lines > LIMIT_LINES else mentioned
                kind.append(f"{name}: {lines} lines, better under {SMELL_LINES}")
            if path.stem in BANNED_NAMES:
                failing.append(f"{name}: name it for what it holds")
    return failing, mentioned


if __name__ == "__main__":
    failures, notes = complaints(Path(__file__).parent.parent)
    sys.stdout.write("".join(f"{line}\n" for line in failures + notes))
    sys.exit(1 if failures else 0)
