"""Built tokenizers of GGUF files, kept on disk: building a large one takes seconds.

An entry is found by the path of the model and believed only when the metadata section of the file
still has the digest that it had, the entry was written by the same builder, and its own checksum is
right. Whatever is wrong with it, the tokenizer is built again. An entry is two lines and a text: a
header, what the file says beside its vocabulary, and the tokenizer in the library's own format.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from kvrelay.shared.checkpoint.fetch import cache_dir

BUILDER = f"1 tokenizers-{tokenizers.__version__}"
"""Raised with every change of what is built from the same file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept, as text."""

    facts: str
    """JSON in one line."""
    tokenizer: str


def load_entry(model: Path) -> Entry | None:
    """The entry of the model's file as it is now, if there is a right one."""
    try:
        header, _, body = _file_of(model).read_bytes().partition(b"\n")
        known = json.loads(header)
        with model.open("rb") as file:
            section = file.read(int(known["section_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if known != _header(section, body):
        return None
    facts, _, tokenizer = body.decode("utf-8").partition("\n")
    return Entry(facts, tokenizer)


def keep_entry(model: Path, section_bytes: int, entry: Entry) -> None:
    """Keep it, for a file whose first `section_bytes` define it. Without room nothing is kept."""
    file, body = _file_of(model), f"{entry.facts}\n{entry.tokenizer}".encode()
    with suppress(OSError):
        with model.open("rb") as stream:
            header = json.dumps(_header(stream.read(section_bytes), body)).encode()
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(header + b"\n" + body)
            os.replace(partial, file)
        except OSError:
            os.unlink(partial)
            raise


def _header(section: bytes, body: bytes) -> dict[str, object]:
    return {
        "builder": BUILDER,
        "section_bytes": len(section),
        "section": hashlib.sha256(section).hexdigest(),
        "body": hashlib.sha256(body).hexdigest(),
    }


def _file_of(model: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(model))).hexdigest()
    return cache_dir() / "tokenizers" / f"{name[:32]}.txt"
