"""Built tokenizers on disk: equal to newly built ones, and never believed when anything differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_tokenizer import TEXTS, byte_level, gguf

from kvrelay.shared.checkpoint import tokenizer as module
from kvrelay.shared.checkpoint import tokenizer_cache
from kvrelay.shared.checkpoint.tokenizer import load_tokenizer

VALUES = byte_level("llama-bpe", eot_token_id=3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for entries, in which tokenizers of any size are kept."""
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_KEPT_TOKENS", 1)
    return tmp_path / "cache" / "tokenizers"


def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each file whose tokenizer is built."""
    paths: list[Path] = []
    original = module.build_gguf_tokenizer

    def build(values: dict[str, object], path: Path) -> object:
        paths.append(path)
        return original(values, path)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build_gguf_tokenizer", build)
    return paths


def test_the_second_load_builds_nothing_and_is_the_same(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = built(monkeypatch)
    path = gguf(tmp_path / "m.gguf", VALUES)
    first, second = load_tokenizer(path), load_tokenizer(path)
    assert builds == [path]
    assert (second.special, second.identity) == (first.special, first.identity)
    assert second.special.eos_token_ids == (3, 260)
    assert second.special_ids == first.special_ids
    for text in TEXTS:
        assert second.encode(text, True) == first.encode(text, True)
        guarded = first.guard(text + "<eos>")
        assert second.guard(text + "<eos>") == guarded
        assert second.encode_guarded(guarded) == first.encode_guarded(guarded)
    ids = range(first.vocab_size)
    assert [second.token_bytes(id) for id in ids] == [first.token_bytes(id) for id in ids]


def test_another_file_at_the_same_path_is_built_anew(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = built(monkeypatch)
    path = tmp_path / "m.gguf"
    for end in (3, 4):
        gguf(path, byte_level("gpt-2", eot_token_id=end))
        assert load_tokenizer(path).special.eos_token_ids == (end, 260)
    assert builds == [path, path]
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize("at", [0, 20, 60, 150, 400, -1])
def test_an_entry_with_a_wrong_byte_is_not_believed(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    builds = built(monkeypatch)
    path = gguf(tmp_path / "m.gguf", VALUES)
    expected = load_tokenizer(path)
    [entry] = kept.iterdir()
    data = bytearray(entry.read_bytes())
    data[at] ^= 1
    entry.write_bytes(data)
    assert load_tokenizer(path).encode("1234 a", True) == expected.encode("1234 a", True)
    assert len(builds) == 2
    load_tokenizer(path)  # the new entry is right again
    assert len(builds) == 2


@pytest.mark.parametrize("length", [0, 1, 100, 300, 1000])
def test_an_entry_that_is_cut_off_is_not_believed(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    builds = built(monkeypatch)
    path = gguf(tmp_path / "m.gguf", VALUES)
    load_tokenizer(path)
    [entry] = kept.iterdir()
    entry.write_bytes(entry.read_bytes()[:length])
    load_tokenizer(path)
    assert len(builds) == 2


def test_an_entry_of_another_builder_is_not_believed(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = built(monkeypatch)
    path = gguf(tmp_path / "m.gguf", VALUES)
    load_tokenizer(path)
    monkeypatch.setattr(tokenizer_cache, "BUILDER", "0")
    load_tokenizer(path)
    assert len(builds) == 2


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(module, "_KEPT_TOKENS", 1)
    path = gguf(tmp_path / "m.gguf", VALUES)
    assert load_tokenizer(path).identity == load_tokenizer(path).identity


def test_a_small_vocabulary_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    load_tokenizer(gguf(tmp_path / "m.gguf", VALUES))
    assert not (tmp_path / "cache").exists()
