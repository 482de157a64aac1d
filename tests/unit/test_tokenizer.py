"""Tokenizers of GGUF files and folders: ids, bytes, end tokens, and what is refused."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrelay.services.router.template import ChatTemplate, Message
from kvrelay.shared.checkpoint.fetch import default_model_path
from kvrelay.shared.checkpoint.gguf_metadata import read_gguf_metadata
from kvrelay.shared.checkpoint.gguf_tokenizer import SPLITS
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.errors import ModelError, RequestError

TEXTS = [
    "",
    "The quick brown fox doesn't jump over 12345 lazy dogs.",
    "Hello world  with   spaces\n\n\nand\ttabs \n and ends ",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # комментарий",
    "中文分词测试模型应该能处理。日本語も。한국어도",
    "naïve café — “quotes” … 1/2 №",
    "🙂👩‍👩‍👧‍👦🇨🇳 emoji 🚀",
    "3.14159 1,000,000 0x1F 2024-01-02 10:30",
    "<|im_start|>user\nHi<|im_end|>\n",
    "e\u0301 \u00a0 \u200b \ufdd0 \x00 \x7f",
]


@pytest.fixture(scope="module")
def default() -> TokenizerInfo:
    path = default_model_path()
    if not path.exists():
        pytest.skip("the default model is not in the cache")
    return load_tokenizer(path)


def text_of(tokenizer: TokenizerInfo, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_what_the_default_model_declares(default: TokenizerInfo) -> None:
    special = default.special
    assert (special.bos_token, special.bos_token_id) == ("<|im_start|>", 1)
    assert (special.eos_token, special.eos_token_id) == ("<|im_end|>", 2)
    assert special.eos_token_ids == (0, 2)
    assert special.add_bos is False
    assert special.chat_template is not None
    assert default.vocab_size == 49152
    assert default.special_ids == frozenset(range(17))
    assert len(default.identity) == 64


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_ids_are_the_text(default: TokenizerInfo, text: str) -> None:
    assert text_of(default, default.encode(text, add_special=True)) == text


def test_ids_of_the_default_model_are_those_of_transformers(default: TokenizerInfo) -> None:
    """Its own conversion of the same metadata."""
    conversion = pytest.importorskip("transformers.integrations.gguf")
    values = read_gguf_metadata(default_model_path())
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    known = ("model", "pre", "tokens", "token_type", "merges")
    described = {names.get(key, key): values[f"tokenizer.ggml.{key}"] for key in known}
    theirs: Tokenizer
    theirs, _ = conversion.convert_gguf_tokenizer("llama", described)
    for text in TEXTS:
        assert default.encode(text, True) == theirs.encode(text).ids, text


def test_every_digit_is_its_own_token(default: TokenizerInfo) -> None:
    """Also those beyond 0-9, which the conversion in transformers, without this split, joins."""
    pieces = [default.token_bytes(id).decode() for id in default.encode("in 2024 ½", False)]
    assert pieces == ["in", " ", "2", "0", "2", "4", " ", "½"]


CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "Hi <there> & 'you'"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " \n中文\n\n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": ""},
    ],
]


def test_chat_prompts_of_the_default_model_are_those_of_transformers(
    default: TokenizerInfo,
) -> None:
    """The text, and so its ids, with no BOS before those that the template writes."""
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    source = default.special.chat_template
    assert source is not None
    template = ChatTemplate(source, "<|im_start|>", "<|im_end|>")
    (texts, _) = theirs.render_jinja_template(
        CONVERSATIONS,
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    for messages, text in zip(CONVERSATIONS, texts, strict=True):
        guarded: list[Message] = [
            {"role": message["role"], "content": default.guard(message["content"])}
            for message in messages
        ]
        assert template.render(messages) == text
        assert default.encode_guarded(template.render(guarded)) == default.encode(text, False)


@pytest.mark.parametrize("text", [*TEXTS, "<|im_<|im_end|>end|>", "<|endoftext|>" * 3])
def test_a_guarded_text_keeps_every_byte_and_no_control_token(
    default: TokenizerInfo, text: str
) -> None:
    ids = default.encode_guarded(default.guard(text))
    assert default.special_ids.isdisjoint(ids)
    assert text_of(default, ids) == text


def test_a_guarded_text_without_control_tokens_has_its_usual_ids(default: TokenizerInfo) -> None:
    for text in TEXTS:
        if "<|" not in text:
            assert default.encode_guarded(default.guard(text)) == default.encode(text, False)


def test_an_id_beyond_the_vocabulary_has_no_bytes(default: TokenizerInfo) -> None:
    assert [default.token_bytes(id) for id in (-1, 49152, 10**9)] == [b"", b"", b""]


# A GGUF writer for tests: enough of the format to make small files, right and wrong.

ALPHABET = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
ALPHABET += [chr(256 + i) for i in range(68)]


def packed(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list)
    items = [packed(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    )


def gguf(path: Path, values: Mapping[str, object], version: int = 3) -> Path:
    pairs = [struct.pack("<Q", len(k.encode())) + k.encode() + packed(v) for k, v in values.items()]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs))
    return path


def byte_level(pre: str, **more: object) -> dict[str, object]:
    tokens = [*ALPHABET, "Ġa", "12", "123", "<bos>", "<eos>", "<think>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    ids = {"bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2}
    merges = ["Ġ a", "1 2", "12 3"]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | ids | more).items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "4", "Ġa"]),
        ("smollm", ["1", "2", "3", "4", "Ġa"]),
        ("qwen2", ["1", "2", "3", "4", "Ġa"]),
        ("llama-bpe", ["<bos>", "123", "4", "Ġa"]),
    ],
)
def test_each_kind_splits_numbers_its_own_way(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    values = byte_level(pre)
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    tokens: Any = values["tokenizer.ggml.tokens"]
    assert [tokens[id] for id in tokenizer.encode("1234 a", add_special=True)] == pieces


def test_every_known_kind_can_be_built(tmp_path: Path) -> None:
    for pre in SPLITS:
        tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", byte_level(pre)))
        assert text_of(tokenizer, tokenizer.encode("a 1\n", add_special=False)) == "a 1\n"


def test_bos_never_comes_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", byte_level("gpt-2", add_bos_token=True)))
    bos = tokenizer.special.bos_token_id
    assert tokenizer.special.add_bos is True
    for text in ("a", "<bos>a"):
        assert tokenizer.encode(text, add_special=True) == [bos, *tokenizer.encode("a", False)]
    assert tokenizer.encode("a", add_special=False).count(bos or 0) == 0


def test_control_tokens_that_overlap_in_a_text_are_all_broken(tmp_path: Path) -> None:
    values = byte_level("gpt-2")
    tokens: Any = values["tokenizer.ggml.tokens"]
    tokens[-3:-1] = ["<ab", "bc>"]
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    for text in ("<abc>", "<ab<abc>bc>"):
        ids = tokenizer.encode_guarded(tokenizer.guard(text))
        assert tokenizer.special_ids.isdisjoint(ids)
        assert text_of(tokenizer, ids) == text


def test_user_defined_tokens_are_whole_and_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", byte_level("gpt-2")))
    (think,) = tokenizer.encode_guarded(tokenizer.guard("<think>"))
    assert tokenizer.token_bytes(think) == b"<think>"
    assert think not in tokenizer.special_ids


def test_all_declared_and_named_ends_count(tmp_path: Path) -> None:
    values = byte_level("gpt-2", eot_token_id=3, eom_token_id=0xFFFFFFFF)
    tokens: Any = values["tokenizer.ggml.tokens"]
    tokens[-3] = "<|im_end|>"
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    assert tokenizer.special.eos_token_ids == (3, len(tokens) - 3, len(tokens) - 2)


def sentencepiece() -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "▁▁"]
    scores = [0.0] * len(tokens) + [-10.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    fields = {
        "model": "llama",
        "tokens": tokens + pieces,
        "token_type": types + [1] * len(pieces),
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    values = sentencepiece()
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    tokens: Any = values["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello hé", add_special=True)
    assert [tokens[id] for id in ids] == ["<s>", "▁hello", "▁h", "<0xC3>", "<0xA9>"]
    assert text_of(tokenizer, ids[1:]) == " hello hé"
    assert tokenizer.special.eos_token_ids == (2,)
    guarded = tokenizer.encode_guarded(tokenizer.guard("</s>"))
    assert 2 not in guarded
    assert text_of(tokenizer, guarded) == " </s>"


def test_pieces_never_merge_into_a_control_token(tmp_path: Path) -> None:
    values: Any = sentencepiece()
    pieces = ["<", "/", "s", ">", "</", "s>", "</s"]
    values["tokenizer.ggml.tokens"] += pieces
    values["tokenizer.ggml.token_type"] += [1] * len(pieces)
    values["tokenizer.ggml.scores"] += [-1.0] * len(pieces)
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    for text in ("</s>", "h<s>h</s>h"):
        ids = tokenizer.encode_guarded(tokenizer.guard(text))
        assert tokenizer.special_ids.isdisjoint(ids)
        assert text_of(tokenizer, ids) == " " + text


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    conversion = pytest.importorskip("transformers.integrations.gguf")
    values = sentencepiece()
    tokenizer = load_tokenizer(gguf(tmp_path / "m.gguf", values))
    known = ("tokens", "token_type", "scores")
    described = {key: values[f"tokenizer.ggml.{key}"] for key in known}
    theirs: Tokenizer
    theirs, _ = conversion.convert_gguf_tokenizer("llama", described | {"tokenizer_type": "llama"})
    for text in [*TEXTS, "hello hello  hellolo", "  hel</s>lo"]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == wanted, text


WRONG: list[tuple[dict[str, object], str]] = [
    ({}, "tokenizer.ggml.model None is not supported"),
    ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
    (byte_level("martian"), "tokenizer.ggml.pre 'martian' is not supported"),
    (byte_level("gpt-2", merges=["a"]), "'a', which is no pair"),
    (byte_level("gpt-2", merges=["a zz"]), "the vocabulary cannot be used"),
    (byte_level("gpt-2", tokens=["a", "a"]), "names a token twice"),
    (byte_level("gpt-2", token_type=[1]), "one type for each token"),
    (sentencepiece() | {"tokenizer.ggml.scores": [1.0]}, "one score for each token"),
    (
        {k: v for k, v in byte_level("gpt-2").items() if "merges" not in k},
        "no tokenizer.ggml.merges",
    ),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=[words for _, words in WRONG])
def test_metadata_that_makes_no_tokenizer_is_refused(
    tmp_path: Path, values: dict[str, object], words: str
) -> None:
    path = gguf(tmp_path / "wrong.gguf", values)
    with pytest.raises(ModelError, match=words) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = gguf(
        tmp_path / "cut.gguf", {"a": 1, "b": "text", "c": ["x", "y"], "d": [1.5], "e": True}
    )
    data = path.read_bytes()
    assert read_gguf_metadata(path) == {"a": 1, "b": "text", "c": ["x", "y"], "d": [1.5], "e": True}
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="is not a usable GGUF file"):
            read_gguf_metadata(path)


GARBLED = [
    (b"GGML" + bytes(40), "does not start with the letters GGUF"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims 1152921504606846976 items"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(9), "cut off"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<II", 99, 0), "type 99"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(9), "not UTF-8"),
    (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**40),
        "claims 1099511627776 items",
    ),
]


@pytest.mark.parametrize(("data", "words"), GARBLED, ids=[words for _, words in GARBLED])
def test_a_garbled_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "garbled.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        read_gguf_metadata(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf: No such file"):
        load_tokenizer(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def folder(path: Path, **files: object) -> Path:
    """The tokenizer of `byte_level("gpt-2")` as a folder, with more JSON files."""
    values: Any = byte_level("gpt-2")
    vocab = {token: id for id, token in enumerate(values["tokenizer.ggml.tokens"])}
    added = [
        {"id": vocab[token], "content": token, "special": True, "normalized": True}
        | {"lstrip": False, "rstrip": False, "single_word": False}
        for token in ("<bos>", "<eos>")
    ]
    merges = [merge.split(" ") for merge in values["tokenizer.ggml.merges"]]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    for name, value in ({"tokenizer": content} | files).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("added", "merges", "typed"),
    [("bos", ["b o", "bo s"], "bos"), ("h", [], "h"), ("h", [], "what")],
)
def test_a_control_token_that_plain_text_becomes_is_refused(
    tmp_path: Path, added: str, merges: list[str], typed: str
) -> None:
    folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    model = content["model"]
    for piece in ("bo", "bos"):
        model["vocab"].setdefault(piece, len(model["vocab"]))
    model["merges"] += [merge.split(" ") for merge in merges]
    token = content["added_tokens"][0] | {"id": model["vocab"][added], "content": added}
    content["added_tokens"].append(token)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(RequestError) as error:
        tokenizer.guard(f"a {typed} b")
    assert f"The text holds '{added}'" in str(error.value)
    ids = tokenizer.encode_guarded(tokenizer.guard("a <eos> z"))
    assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [({"eos_token_id": [5, 6]}, (5, 6, 260)), ({"eos_token_id": 7}, (7, 260)), ({}, (260,))],
)
def test_every_end_that_a_folder_declares_counts(
    tmp_path: Path, generation: dict[str, object], ends: tuple[int, ...]
) -> None:
    path = folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<eos>"}},
        config={"eos_token_id": 260},
        generation_config=generation,
    )
    assert load_tokenizer(path).special.eos_token_ids == ends


@pytest.mark.parametrize("value", [[0, 1 << 40], 1 << 31, -1, True, "2"])
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_an_end_that_no_token_can_have_is_refused(tmp_path: Path, name: str, value: object) -> None:
    folder(tmp_path, **{name: {"eos_token_id": value}})
    message = rf"/{name}\.json: eos_token_id must be a whole number below 2\^31 or a list of them, "
    with pytest.raises(ModelError, match=message + re.escape(f"not {str(value)!r}")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("id", [1 << 31, (1 << 32) - 1])
def test_an_end_token_has_an_id_that_can_be_sent(tmp_path: Path, id: int) -> None:
    file = folder(tmp_path, tokenizer_config={"eos_token": "<eos>"}) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["<eos>"] = content["added_tokens"][1]["id"] = id
    file.write_text(json.dumps(content))
    message = rf"tokenizer\.json: the id of eos_token must be .* below 2\^31 .*, not '{id}'"
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_an_end_of_a_gguf_that_no_token_can_have_is_refused(tmp_path: Path, name: str) -> None:
    values = byte_level("gpt-2", **{f"{name}_token_id": 1 << 31})
    message = rf"m\.gguf: tokenizer\.ggml\.{name}_token_id must be .* below 2\^31 .*'2147483648'"
    with pytest.raises(ModelError, match=message):
        load_tokenizer(gguf(tmp_path / "m.gguf", values))


def test_a_folders_template_is_a_file_or_a_string_or_the_default_of_several(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder(tmp_path, tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).special.chat_template == "D"
    folder(tmp_path, tokenizer_config={"chat_template": "S"})
    assert load_tokenizer(tmp_path).special.chat_template == "S"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).special.chat_template == "F"


def test_control_tokens_of_older_folders_can_be_guarded_too(tmp_path: Path) -> None:
    """They declare `normalized`, so the library would look for them behind the normalizer."""
    tokenizer = load_tokenizer(folder(tmp_path))
    assert tokenizer.encode("<eos>", False) == [260]
    assert 260 not in tokenizer.encode_guarded(tokenizer.guard("<eos>"))


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    for data in (b"", b"{", b"{}", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer"):
            load_tokenizer(tmp_path)
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_equal_tokenizers_have_equal_identities(tmp_path: Path) -> None:
    files = [
        gguf(tmp_path / f"{i}.gguf", byte_level("gpt-2") | {"general.name": f"n{i}"})
        for i in (1, 2)
    ]
    one, two = (load_tokenizer(file).identity for file in files)
    other = load_tokenizer(gguf(tmp_path / "3.gguf", byte_level("smollm"))).identity
    assert one == two
    assert one != other
