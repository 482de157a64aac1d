"""How tokens and their logprobs are worded on each route.

A token's text stands for its true bytes: those that are no whole character are written as `\\xe2`,
so that two tokens never look the same because both are a part of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.services.router.openai.legs import finite
from kvrelay.services.router.openai.wording import Told
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo
from kvrelay.shared.types import Logprobs


def completion_logprobs(
    tokens: Sequence[Told], top: int, tokenizer: TokenizerInfo
) -> dict[str, list[Any]]:
    """`logprobs` of /v1/completions: four lists of one length. The token itself is always among
    the top ones, which can therefore be one more than were asked for."""
    return {
        "text_offset": [told.offset for told in tokens],
        "token_logprobs": [
            None if told.logprobs is None else finite(told.logprobs.chosen) for told in tokens
        ],
        "tokens": [_completion_spelling(tokenizer, told.token) for told in tokens],
        "top_logprobs": [_completion_top(told, top, tokenizer) for told in tokens],
    }


def _completion_top(told: Told, top: int, tokenizer: TokenizerInfo) -> dict[str, float] | None:
    if told.logprobs is None:
        return None
    named: dict[str, float] = {}
    for token, logprob in (*told.logprobs.top[:top], (told.token, told.logprobs.chosen)):
        # Two ids may have the same bytes; the likelier comes first and stays.
        named.setdefault(_completion_spelling(tokenizer, token), finite(logprob))
    return named


def _completion_spelling(tokenizer: TokenizerInfo, token: int) -> str:
    spelling = _spelling(tokenizer, token)
    whole = spelling.encode() == tokenizer.token_bytes(token)
    return spelling if whole else f"bytes:{spelling}"


def chat_logprobs(
    tokens: Sequence[Told], top: int, tokenizer: TokenizerInfo
) -> dict[str, list[Any] | None]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = []
    for told in tokens:
        if told.logprobs is not None:
            likeliest = [_chat_entry(*pair, tokenizer) for pair in told.logprobs.top[:top]]
            entry = _chat_entry(told.token, told.logprobs.chosen, tokenizer)
            content.append({**entry, "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float, tokenizer: TokenizerInfo) -> dict[str, Any]:
    return {
        "token": _spelling(tokenizer, token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[Logprobs], top: int, tokenizer: TokenizerInfo
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs`: by position, then by token id; nothing predicts the first token."""
    told: list[dict[str, dict[str, Any]] | None] = [None]
    for token, at in zip(prompt[1:], logprobs, strict=True):
        ranked = [(token, at.chosen, at.rank)]
        ranked += [(id, logprob, rank) for rank, (id, logprob) in enumerate(at.top[:top], start=1)]
        told.append(
            {
                str(id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": _spelling(tokenizer, id),
                }
                for id, logprob, rank in ranked
            }
        )
    return told


def _spelling(tokenizer: TokenizerInfo, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
