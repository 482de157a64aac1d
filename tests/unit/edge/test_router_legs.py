"""A leg's text and tokens with a vocabulary of pieces and bytes, as SentencePiece makes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvrelay.services.router.generation import TokenEvent
from kvrelay.services.router.openai.legs import prompt_offsets
from kvrelay.services.router.openai.parse import parse_body
from kvrelay.services.router.openai.schema import CompletionBody
from kvrelay.services.router.openai.transcript import Transcript
from kvrelay.services.router.openai.wording import joined
from kvrelay.services.router.validate import ModelCard, Origin, model_card, valid_completion
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.types import FinishReason, Logprobs, ValidRequest

FAMILY = "👩‍👧 日 é"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """BOS before a text, a space in front of its first word, bytes for what has no piece."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
    ]
    model = models.BPE(
        vocab={name: id for id, name in enumerate(names)},
        merges=[("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder: Path = tmp_path_factory.mktemp("pieces")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model_card(["tiny"], load_tokenizer(folder), 200, 0)


def request_of(card: ModelCard, **fields: Any) -> ValidRequest:
    body = json.dumps({"model": "tiny", "echo": True, "logprobs": 0} | fields).encode()
    return valid_completion(parse_body(CompletionBody, body), card, Origin("r", 7))


def byte_ids(tokenizer: TokenizerInfo, text: str) -> list[int]:
    of = {tokenizer.token_bytes(id): id for id in reversed(range(tokenizer.vocab_size))}
    return [of[bytes([byte])] for byte in text.encode()]


def test_an_echo_is_the_text_and_offsets_are_in_it(pieces: ModelCard) -> None:
    """BOS and the first space are tokens, but no part of the text."""
    request = request_of(pieces, prompt="a b a")
    spelled = [pieces.tokenizer.token_bytes(id).decode() for id in request.legs[0].prompt]
    assert spelled == ["<s>", " a", " ", "b", " a"]
    assert request.form.echo == ("a b a",)
    assert prompt_offsets(request.legs[0].prompt, "a b a", pieces.tokenizer) == [0, 0, 1, 2, 3]


def test_offsets_of_a_prompt_are_of_characters(card: ModelCard) -> None:
    request = request_of(card, prompt="é🙂x")
    offsets = prompt_offsets(request.legs[0].prompt, "é🙂x", card.tokenizer)
    assert offsets == [0, 0, 1, 1, 1, 1, 2]


def test_characters_made_of_bytes_are_whole_in_every_delta(pieces: ModelCard) -> None:
    request = request_of(pieces, prompt="a", max_tokens=99)
    transcript = Transcript(request, pieces.tokenizer)
    unknown = tuple(Logprobs(-1.0, 1) for _ in request.legs[0].prompt[1:])
    ids = byte_ids(pieces.tokenizer, FAMILY)
    deltas = []
    for index, id in enumerate(ids):
        finish = FinishReason.LENGTH if index == len(ids) - 1 else None
        event = TokenEvent(0, index, id, finish, Logprobs(-0.5, 1), unknown if not index else ())
        deltas += transcript.take(event).deltas
    assert not any("\ufffd" in delta.text for delta in deltas)
    whole = joined(deltas)
    assert whole.text == "a" + FAMILY
    assert b"".join(pieces.tokenizer.token_bytes(told.token) for told in whole.tokens) == (
        FAMILY.encode()
    )
    starts = [
        len(("a" + FAMILY).encode()[: 1 + at].decode("utf-8", "ignore")) for at in range(len(ids))
    ]
    assert [told.offset for told in whole.tokens] == starts


def test_a_character_that_was_cut_off_is_one_mark(pieces: ModelCard) -> None:
    request = replace(request_of(pieces, prompt="a"), stop=("\ufffd",))
    transcript = Transcript(request, pieces.tokenizer)
    first, second = byte_ids(pieces.tokenizer, "🙂")[:2]
    logprobs = Logprobs(-0.5, 1)
    begun = transcript.take(TokenEvent(0, 0, first, None, logprobs, (logprobs,)))
    assert [delta.text for delta in begun.deltas] == ["a"]
    ended = transcript.take(TokenEvent(0, 1, second, FinishReason.LENGTH, logprobs))
    assert [(delta.text, delta.finish) for delta in ended.deltas] == [("", FinishReason.STOP)]
    assert [told.offset for told in ended.deltas[0].tokens] == [1, 1]
