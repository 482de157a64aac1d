"""API keys: who may ask. Kept as digests, compared in constant time, read again when told to."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvrelay.shared.errors import ConfigError

log = logging.getLogger(__name__)

MAX_KEY_CHARACTERS = 512
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")


class ApiKeys:
    """Those of the settings and those of the file together. None at all: everybody may ask."""

    def __init__(self, given: Sequence[str] = (), file: str = "") -> None:
        """Raises `ConfigError`, which names a bad key by its place and never by itself."""
        for at, key in enumerate(given, 1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"api-key: key {at} {_WANTED}")
        self._given = _digests(given)
        self._file = file
        self._digests = self._given + (_read(file) if file else ())

    @property
    def wanted(self) -> bool:
        """Whether a key is needed."""
        return bool(self._digests)

    def admits(self, key: str) -> bool:
        """Takes as long whichever key matches, and whether one does."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def reload(self) -> None:
        """The file as it is now. One that cannot be read changes nothing: nobody is let in or
        shut out by a slip of the pen."""
        if not self._file:
            return
        try:
            self._digests = self._given + _read(self._file)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("API keys read again: %d", len(self._digests))


_WANTED = f"must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters without spaces"


def _read(file: str) -> tuple[bytes, ...]:
    """One key a line; empty lines and those that begin with # do not count."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api-key-file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"api-key-file: {file} is not UTF-8 text") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            if not _KEY.fullmatch(line):
                raise ConfigError(f"api-key-file: {file}, line {number}: a key {_WANTED}")
            keys.append(line)
    if not keys:
        raise ConfigError(f"api-key-file: {file} holds no key")
    return _digests(keys)


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    """Of one length for all keys, so that comparing tells nothing of it either."""
    return hashlib.sha256(key.encode()).digest()
