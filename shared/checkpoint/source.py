"""Where a model comes from (a Hugging Face folder, a GGUF file, a hub id) and what its bits are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrelay.shared.checkpoint.fields import named_once
from kvrelay.shared.errors import ModelError

Kind = Literal["folder", "gguf", "hub"]

_INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 1 << 22
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
"""What is fetched of a repository: no pickles and no code."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine's disk. `kind` hub is a folder that came from the hub."""

    kind: Kind
    path: Path


def resolve_model(name: str) -> ModelSource:
    """Find the model that `name` means: a folder, a .gguf file, or else a hub id.

    Raises `ModelError`: a path that is missing, unreadable or of another kind, or a hub id that
    cannot be fetched.
    """
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return ModelSource("folder", _checked_folder(path))
        if path.is_file():
            return ModelSource("gguf", _checked_gguf(path))
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror}") from error
    if _looks_like_path(name):
        raise ModelError(f"there is no model at {path}")
    return ModelSource("hub", _checked_folder(_fetch_from_hub(name)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the shards its index names, or the single file.

    Raises `ModelError` for a missing or unreadable one, or an index that names other paths.
    """
    shards = shards_of_tensors(folder)
    if not shards:
        return [_existing(folder / "model.safetensors")]
    index, names = folder / _INDEX, sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}, which is no safetensors file beside it")
    return [_existing(folder / name) for name in names]


def shards_of_tensors(folder: Path) -> dict[str, str]:
    """What a folder's index says: the file of each tensor. Empty without an index."""
    index = folder / _INDEX
    if not index.exists():
        return {}
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=named_once)
        shards = {tensor: str(file) for tensor, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not a readable safetensors index: {error}") from error
    if not shards:
        raise ModelError(f"{index} names no tensor")
    return shards


def weights_id(source: ModelSource) -> str:
    """SHA-256 over the weights and what fixes their arithmetic, as 64 hex digits.

    For a folder: config.json and every weights file; for a GGUF: the file. Paths do not count.
    """
    files = [source.path]
    if source.kind != "gguf":
        files = [source.path / "config.json", *weight_files(source.path)]
    whole = hashlib.sha256()
    for file in files:
        # A file may be renamed without becoming another model, but a folder's files have roles.
        role = "" if source.kind == "gguf" else file.name
        whole.update(f"{role}\n{_sha256(file)}\n".encode())
    return whole.hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    return digest.hexdigest()


def _checked_folder(folder: Path) -> Path:
    _existing(folder / "config.json")
    weight_files(folder)
    return folder


def _checked_gguf(file: Path) -> Path:
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{file} is neither a model folder nor a GGUF file")
    return file


def _existing(file: Path) -> Path:
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error


def _looks_like_path(name: str) -> bool:
    """A hub id is `name` or `owner/name`; everything else can only be meant as a path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf")


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a path nor a model id of the hub") from error
    except OSError as error:  # the base of the hub's own errors, of no network and of no disk
        reason = str(error).partition("\n")[0]
        message = f"{name!r} is no path here, and the hub does not answer: {reason}"
        raise ModelError(message) from error
