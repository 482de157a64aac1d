"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata.

Two kinds: `gpt2`, byte-level BPE whose way of splitting text is named by `tokenizer.ggml.pre`, and
`llama`, SentencePiece BPE with scores and byte fallback. A name that is not in the tables below is
refused: a wrong split gives fluent, wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from kvrelay.shared.checkpoint.fields import Fields
from kvrelay.shared.checkpoint.gguf_metadata import GGUFValue
from kvrelay.shared.errors import ModelError


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` (llama.h, `llama_token_type`): those that are found whole."""

    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class Split:
    """How one family cuts text before BPE merges it."""

    pattern: str | None
    """None: the pattern of GPT-2, which the `tokenizers` library has built in."""
    single_digits: bool = False
    whole_words_first: bool = False
    """A word that is in the vocabulary is one token even when no merges lead to it."""
    nfc: bool = False
    add_bos: bool = False
    """What holds when the file does not say."""


_CASELESS_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = Split(_CASELESS_WORDS + r"\p{N}{1,3}" + _REST, whole_words_first=True, add_bos=True)
_QWEN2 = Split(_CASELESS_WORDS + r"\p{N}" + _REST, nfc=True)

SPLITS: Mapping[str, Split] = {
    "default": Split(None),
    "gpt-2": Split(None),
    "smollm": Split(None, single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}

END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
"""Control tokens that end an answer wherever they are: a GGUF names at most three end ids, and many
name only one, while the same model's generation config lists all of them."""


def build_gguf_tokenizer(values: Mapping[str, GGUFValue], path: Path) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether plain text gets BOS. Raises `ModelError`, which names the file."""
    kind = values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(values, path)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(values, path), True
    else:
        raise ModelError(f"{path}: tokenizer.ggml.model {kind!r} is not supported (gpt2, llama)")
    _add_marked_tokens(tokenizer, values, path)
    declared = values.get("tokenizer.ggml.add_bos_token")
    add_bos = declared if isinstance(declared, bool) else add_bos
    return tokenizer, add_bos and _add_bos(tokenizer, values)


def named_id(values: Mapping[str, GGUFValue], name: str, tokenizer: Tokenizer) -> int | None:
    """The id in `tokenizer.ggml.<name>_token_id`, if there is one and it has a token."""
    id = values.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(id, int) or id < 0:
        return None
    return None if tokenizer.id_to_token(id) is None else id


def end_ids(values: Mapping[str, GGUFValue], tokenizer: Tokenizer, path: Path) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the declared ones, and control tokens of a known name.

    Raises `ModelError` for a declared one that no token can have.
    """
    declared = Fields(str(path), values).gguf_ends()
    ends = {id for id in declared if tokenizer.id_to_token(id) is not None}
    for id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and token.content in END_TOKENS:
            ends.add(id)
    return tuple(sorted(ends))


def _byte_level(values: Mapping[str, GGUFValue], path: Path) -> tuple[Tokenizer, bool]:
    name = values.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        known = ", ".join(SPLITS)
        raise ModelError(f"{path}: tokenizer.ggml.pre {name!r} is not supported ({known})")
    merges = [_pair(merge, path) for merge in _texts(values, "merges", path)]
    vocab = _vocab(values, path)
    whole = split.whole_words_first
    tokenizer = _tokenizer(
        path, lambda: models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(values: Mapping[str, GGUFValue], path: Path) -> Tokenizer:
    vocab = _vocab(values, path)
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise ModelError(f"{path}: tokenizer.ggml.scores must have one score for each token")
    ranked = _merges_of_scores(vocab, [float(score) for score in scores], _control(values))
    unknown = values.get("tokenizer.ggml.unknown_token_id", 0)
    unknown_token = next((token for token, id in vocab.items() if id == unknown), None)
    options = {"unk_token": unknown_token, "fuse_unk": True, "byte_fallback": True}
    tokenizer = _tokenizer(path, lambda: models.BPE(vocab=vocab, merges=ranked, **options))
    prefixed = values.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefixed else "never"
    tokenizer.pre_tokenizer = pre.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _control(values: Mapping[str, GGUFValue]) -> frozenset[int]:
    kinds = values.get("tokenizer.ggml.token_type", [])
    kinds = kinds if isinstance(kinds, list) else []
    return frozenset(id for id, kind in enumerate(kinds) if kind == TokenKind.CONTROL)


def _merges_of_scores(
    vocab: Mapping[str, int], scores: list[float], control: Set[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose joined piece has the best score: as ranked pairs.
    Nothing merges into a control token.

    Among splits of equal score the longer left part ranks first, then the longer right part.
    """
    pairs = [
        (scores[id], token[:cut], token[cut:])
        for token, id in vocab.items()
        if id not in control
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    return [(left, right) for _, left, right in pairs]


def _tokenizer(path: Path, build: Callable[[], models.BPE]) -> Tokenizer:
    try:
        return Tokenizer(build())
    except Exception as error:  # the library has no narrower class for merges it cannot use
        raise ModelError(f"{path}: the vocabulary cannot be used: {error}") from error


def _add_marked_tokens(tokenizer: Tokenizer, values: Mapping[str, GGUFValue], path: Path) -> None:
    """Tokens that are found whole in raw text: control tokens, and those a user defined."""
    tokens = _texts(values, "tokens", path)
    kinds = values.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise ModelError(f"{path}: tokenizer.ggml.token_type must have one type for each token")
    marked = [
        AddedToken(token, normalized=False, special=kind == TokenKind.CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if token and kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in marked if token.special])
    tokenizer.add_tokens([token for token in marked if not token.special])


def _add_bos(tokenizer: Tokenizer, values: Mapping[str, GGUFValue]) -> bool:
    id = named_id(values, "bos", tokenizer)
    if id is None:
        return False
    token = tokenizer.id_to_token(id)
    tokenizer.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=None, special_tokens=[(token, id)]
    )
    return True


def _vocab(values: Mapping[str, GGUFValue], path: Path) -> dict[str, int]:
    tokens = _texts(values, "tokens", path)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.tokens names a token twice")
    return vocab


def _texts(values: Mapping[str, GGUFValue], name: str, path: Path) -> list[str]:
    texts = values.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{path} has no tokenizer.ggml.{name}")
    return [str(text) for text in texts]


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not (left and blank and right):
        raise ModelError(f"{path}: tokenizer.ggml.merges has the entry {merge!r}, which is no pair")
    return left, right
