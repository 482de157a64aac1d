"""The tokenizer of a model, on the `tokenizers` library alone: ids, bytes, end tokens, template.

Text that a person typed must never become a control token (`<|im_end|>` in a chat message forges a
turn). Cutting the text apart there would change how its neighbours are tokenized. So `guard` puts
*breaks* of two noncharacters inside each control token it finds in a text; control tokens are
found in the raw text, and only then the normalizer takes the breaks out again. A rendered chat
template holds real control tokens where the template wrote them, and plain text elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from kvrelay.shared.checkpoint.fields import Fields
from kvrelay.shared.checkpoint.gguf_metadata import GGUFValue, read_gguf_section
from kvrelay.shared.checkpoint.gguf_tokenizer import build_gguf_tokenizer, end_ids, named_id
from kvrelay.shared.checkpoint.tokenizer_cache import Entry, keep_entry, load_entry
from kvrelay.shared.errors import ModelError, RequestError

_ESCAPE, _ESCAPED, _BREAK = "\ufdd0", "\ufdd0\ufdd1", "\ufdd0\ufdd2"
"""U+FDD0 starts both sequences; one that stands in a text itself travels as `_ESCAPED`."""

_KEPT_TOKENS = 8192
"""A smaller vocabulary is built in less time than it takes to look for it."""
_AROUND = (("", ""), ("a", "b"), (" ", " "))
"""Neighbours of a control token in a text: words are taken apart differently beside each."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the model folder says beside its vocabulary."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends an answer, ascending: of the generation config, EOS, end of turn."""
    add_bos: bool
    """Whether plain text (not chat, where the template writes it) is preceded by BOS."""
    chat_template: str | None


class TokenizerInfo:
    """Immutable after construction; `encode` may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens, identity: str) -> None:
        self.special = special
        self.identity = identity
        """SHA-256 (hex) of what defines the tokenizer: equal for equal tokenizers of one format."""
        added = tokenizer.get_added_tokens_decoder()
        contents = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes = _bytes_of_tokens(tokenizer, contents)
        self.longest_token_bytes = max(map(len, self._bytes), default=1)
        self._broken = _with_breaks_inside({contents[id] for id in self.special_ids})
        self._control = _any_of(self._broken)
        self._tokenizer = _taking_breaks_out(tokenizer)
        self._formed = _any_of(
            self._formed_by_itself({id: contents[id] for id in self.special_ids})
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's own vocabulary may be padded beyond it."""
        return len(self._bytes)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of a plain text; control tokens written in it are real ones.

        With `add_special` BOS comes first if the model wants that, and never twice.
        """
        bos = self.special.bos_token
        if bos and text.startswith(bos):
            add_special = False
        return self.encode_guarded(text.replace(_ESCAPE, _ESCAPED), add_special)

    def encode_guarded(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of a text whose untrusted parts went through `guard`."""
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoded[0].ids
        return ids

    def guard(self, text: str) -> str:
        """The same text for `encode_guarded`, with nothing in it that is a control token.

        Raises `RequestError` for one that this vocabulary makes of plain text, too.
        """
        if self._formed is not None and (found := self._formed.search(text)):
            raise RequestError(
                f"The text holds {found[0]!a}, which this model's tokenizer cannot tell from its "
                "control token"
            )
        return self._guarded(text)

    def _guarded(self, text: str) -> str:
        text = text.replace(_ESCAPE, _ESCAPED)
        if self._control is None:
            return text
        return self._control.sub(lambda match: self._broken[match[0]], text)

    def _formed_by_itself(self, control: Mapping[int, str]) -> set[str]:
        """Those that cannot be broken, and those that merges or pieces put together again."""
        tried = [(id, text) for id, text in control.items() for _ in _AROUND]
        around = _AROUND * len(control)
        guarded = [
            self._guarded(a + text + b) for (_, text), (a, b) in zip(tried, around, strict=True)
        ]
        encoded = self._tokenizer.encode_batch_fast(guarded, add_special_tokens=False)
        return {text for (id, text), found in zip(tried, encoded, strict=True) if id in found.ids}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids of the vocabulary together, control tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """True bytes of a token, maybe part of a character; none beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""


def load_tokenizer(path: Path) -> TokenizerInfo:
    """From a Hugging Face folder or a `.gguf` file. Raises `ModelError`, which names the file."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> TokenizerInfo:
    kept = load_entry(path)
    if kept is not None:
        facts = json.loads(kept.facts)
        ends = tuple(facts["special"].pop("eos_token_ids"))
        special = SpecialTokens(**facts["special"], eos_token_ids=ends)
        return TokenizerInfo(Tokenizer.from_str(kept.tokenizer), special, facts["identity"])
    values, section_bytes = read_gguf_section(path)
    tokenizer, add_bos = build_gguf_tokenizer(values, path)
    special = _gguf_special(values, tokenizer, add_bos, path)
    defining = {key: value for key, value in values.items() if key.startswith("tokenizer.")}
    identity = hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()
    if tokenizer.get_vocab_size() >= _KEPT_TOKENS:
        kept_facts = json.dumps({"special": asdict(special), "identity": identity})
        keep_entry(path, section_bytes, Entry(kept_facts, tokenizer.to_str()))
    return TokenizerInfo(tokenizer, special, identity)


def _gguf_special(
    values: Mapping[str, GGUFValue], tokenizer: Tokenizer, add_bos: bool, path: Path
) -> SpecialTokens:
    template = values.get("tokenizer.chat_template")
    bos, eos = named_id(values, "bos", tokenizer), named_id(values, "eos", tokenizer)
    return SpecialTokens(
        bos_token=None if bos is None else tokenizer.id_to_token(bos),
        bos_token_id=bos,
        eos_token=None if eos is None else tokenizer.id_to_token(eos),
        eos_token_id=eos,
        eos_token_ids=end_ids(values, tokenizer, path),
        add_bos=add_bos,
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(folder: Path) -> TokenizerInfo:
    file = folder / "tokenizer.json"
    source = _read(file)
    if source is None:
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(_with_raw_control_tokens(source))
    except Exception as error:  # the library has no narrower class for a file it cannot use
        raise ModelError(f"{file} is not a usable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    names = {**_read_json(folder / "special_tokens_map.json"), **config}
    bos, eos = _content(names.get("bos_token")), _content(names.get("eos_token"))
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    special = SpecialTokens(
        bos_token=bos,
        bos_token_id=None if bos is None else tokenizer.token_to_id(bos),
        eos_token=eos,
        eos_token_id=eos_id,
        eos_token_ids=_folder_end_ids(folder, eos_id),
        add_bos=len(tokenizer.encode("").ids) > 0,
        chat_template=_folder_template(folder, config),
    )
    return TokenizerInfo(tokenizer, special, hashlib.sha256(source).hexdigest())


def _with_raw_control_tokens(source: bytes) -> str:
    """The file's text, with every control token found in raw text: some older files look for them
    after normalization, where `guard`'s breaks are gone again."""
    text = source.decode("utf-8")
    if not re.search(r'"normalized"\s*:\s*true', text):
        return text
    content = json.loads(text)
    for token in content.get("added_tokens", []):
        token["normalized"] = token["normalized"] and not token["special"]
    return json.dumps(content)


def _folder_end_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """All that any of the folder's files declares: one of them alone is often incomplete."""
    # Before anything is made that has a place for each id up to the largest.
    named = Fields(str(folder / "tokenizer.json"), {"the id of eos_token": eos_id})
    ends = {*named.integers("the id of eos_token")}
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ends.update(Fields(str(file), _read_json(file)).integers("eos_token_id"))
    return tuple(sorted(ends))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = _read(folder / "chat_template.jinja")
    if file is not None:
        return file.decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the one for plain chat
        named = [item for item in template if isinstance(item, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _content(token: object) -> str | None:
    """A special token in a config: its text, or an object with the text in `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    data = _read(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _taking_breaks_out(tokenizer: Tokenizer) -> Tokenizer:
    """Let the normalizer, which runs after control tokens were found, take the breaks out."""
    steps: list[Any] = [normalizers.Replace(_BREAK, ""), normalizers.Replace(_ESCAPED, _ESCAPE)]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _with_breaks_inside(tokens: Set[str]) -> dict[str, str]:
    """Each token with a break behind every character where it, or a token that overlaps it, begins.

    A token of one character cannot be broken and is left out: `guard` refuses it.
    """
    return {
        token: "".join(
            character + _BREAK if _begins_at(token, at, tokens) else character
            for at, character in enumerate(token)
        )
        for token in tokens
        if len(token) > 1
    }


def _begins_at(token: str, at: int, tokens: Set[str]) -> bool:
    rest = token[at:]
    return any(other.startswith(rest) or rest.startswith(other) for other in tokens)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    alternatives = "|".join(sorted(map(re.escape, tokens)))
    return re.compile(alternatives) if alternatives else None


def _bytes_of_tokens(tokenizer: Tokenizer, added: Mapping[int, str]) -> list[bytes]:
    """Index is the id; an id without a token has no bytes."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    spell = _spelling(tokenizer)
    for token, id in vocab.items():
        table[id] = spell(token)
    for id, content in added.items():
        table[id] = content.encode("utf-8")
    return table


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How this vocabulary writes bytes; known by the names in its decoder."""
    decoder = "" if tokenizer.decoder is None else str(tokenizer.decoder.__getstate__())
    if "ByteLevel" in decoder:
        return _byte_level_bytes
    if "ByteFallback" in decoder or "Metaspace" in decoder:
        return _sentencepiece_bytes
    raise ModelError("the tokenizer is neither byte-level BPE nor SentencePiece with byte fallback")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes are themselves, the others U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + position): byte for position, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
