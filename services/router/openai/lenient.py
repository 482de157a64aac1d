"""What `--lenient-fields` lets pass: fields that are not known are left out, with a warning.

For clients that send more than anybody reads. A field that constrains the answer is never left
out: who asked for JSON, a choice or a ban and got free text would not notice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from kvrelay.services.router.openai.schema import (
    IGNORED,
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    ChatMessage,
)

log = logging.getLogger(__name__)

_CONSTRAINS = re.compile(
    r"guided|grammar|regex|schema|ebnf|choice|json|struct|format|stop|tool|function|bias|allow|"
    r"bad_words|ban|mask|max_|min_|limit|processor|prompt|message|document|template|suffix|beam|"
    r"modalit|audio|best_of"
)
"""Words in the names of fields that say what an answer may be, or what it is an answer to."""
_MOST_WARNED = 256

_warned: set[str] = set()


def without_unknown(fields: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """`fields` of a body without those that the model `kind` lacks, in its messages too."""
    kept = _kept(fields, kind.model_fields.keys() | IGNORED, "")
    messages = kept.get("messages")
    if isinstance(messages, list):
        known = ChatMessage.model_fields.keys() | NEUTRAL_IN_MESSAGE.keys()
        kept["messages"] = [
            _kept(message, known, "messages[].") if isinstance(message, dict) else message
            for message in messages
        ]
    return kept


def _kept(fields: Mapping[str, Any], known: Iterable[str], where: str) -> dict[str, Any]:
    known = frozenset(known)
    kept = {}
    for name, value in fields.items():
        if name in known or _CONSTRAINS.search(name):
            kept[name] = value
        elif value is not None:
            _warn(where, name)
    return kept


def _warn(where: str, name: str) -> None:
    """Once for each name, and for no more names than a person reads."""
    shown = where + ascii(name[:64])[1:-1]
    if shown in _warned or len(_warned) >= _MOST_WARNED:
        return
    _warned.add(shown)
    kind = "not supported" if name in NEUTRAL else "not known"
    log.warning("a request's field %s is %s and was left out", shown, kind)
