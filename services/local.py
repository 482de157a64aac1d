"""Runs of `kvrelay up` on this machine: a folder each, and where commands find their cluster."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Final, TypeVar

from kvrelay.shared.checkpoint.fetch import cache_dir
from kvrelay.shared.config import Resolved, Settings
from kvrelay.shared.errors import ConfigError

_KEPT_RUNS: Final = 10
_CLUSTER: Final = "cluster.json"
S = TypeVar("S", bound=Settings)


def run_folder() -> Path:
    """A new folder for this run's logs, after dropping those of long ago."""
    runs = cache_dir() / "runs"
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"KVRELAY_CACHE_DIR: cannot keep logs in {folder}: {error}") from error
    for old in sorted(runs.iterdir())[:-_KEPT_RUNS]:
        if not _runs_still(old):
            shutil.rmtree(old, ignore_errors=True)  # another run may be doing the same
    return folder


def _runs_still(folder: Path) -> bool:
    """Whether the process that a folder of logs is named after is there."""
    pid = folder.name.rpartition("-")[2]
    return pid.isdecimal() and Path("/proc", pid).exists()


def announce(folder: Path, redis_url: str, cluster: str) -> None:
    """For `of_this_machine`. Only the owner can read it: the URL may have a password in it."""
    path = folder / _CLUSTER
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"redis_url": redis_url, "cluster": cluster}, file)


def withdraw(folder: Path) -> None:
    """The cluster has ended."""
    (folder / _CLUSTER).unlink(missing_ok=True)


def of_this_machine(resolved: Resolved[S]) -> S:
    """The settings of a command that looks at a cluster: when nobody said which, the one that
    `kvrelay up` runs here. Raises `ConfigError` when there are several."""
    config = resolved.config
    if resolved.origins["redis_url"] != "default":
        return config
    found = [told for folder in _runs() if (told := _told(folder)) is not None]
    if len(found) > 1:
        urls = ", ".join(sorted(each["redis_url"].rpartition("@")[2] for each in found))
        raise ConfigError(f"redis: {len(found)} clusters run here, name one: {urls}")
    if not found:
        return config
    given = {name for name, origin in resolved.origins.items() if origin != "default"}
    update = {name: value for name, value in found[0].items() if name not in given}
    return config.model_copy(update=update)


def _runs() -> list[Path]:
    runs = cache_dir() / "runs"
    return [folder for folder in runs.iterdir() if _runs_still(folder)] if runs.is_dir() else []


def _told(folder: Path) -> dict[str, str] | None:
    try:
        told: dict[str, str] = json.loads((folder / _CLUSTER).read_text())
    except (OSError, ValueError):
        return None  # it has not come so far, or is another's
    return told
