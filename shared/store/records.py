"""What processes tell each other through Redis: JSON objects with named fields and a version.

A reader ignores fields it does not know and refuses a record it cannot trust with a `StoreError`
that names the field, so that whatever lies in Redis can never crash it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvrelay.shared.errors import StoreError
from kvrelay.shared.ports import is_wildcard
from kvrelay.shared.types import Incarnation, Role

VERSION: Final = 1
MAX_RECORD_BYTES: Final = 16_384
MAX_TEXT_CHARS: Final = 512
MAX_COUNT: Final = 2**53
FINGERPRINT_FIELDS: Final = (
    "protocol",
    "layout",
    "dtype",
    "block_size",
    "weights",
    "tokenizer",
    "numerics",
    "transport",
)
"""The order in which a misfit is looked for: the field a person can change most easily first."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """How a worker can be reached and what it may be paired with."""

    incarnation: Incarnation
    role: Role
    name: str
    model: str
    grpc_address: str
    """`host:port` that other machines can reach."""
    metrics_address: str
    """`host:port`, or "" for none."""
    transfer_scheme: str
    transfer_address: bytes
    """Opaque to everyone but the transport named by `transfer_scheme`."""
    fingerprint: Mapping[str, str]
    """`FINGERPRINT_FIELDS` -> value; only workers with equal fingerprints are ever paired."""
    block_size: int
    pool_blocks: int
    max_model_len: int
    max_num_seqs: int

    @property
    def group(self) -> str:
        """Sixteen hex digits that are equal exactly for workers that may be paired."""
        text = json.dumps(dict(self.fingerprint), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Raises `StoreError` for a record that `from_json` would refuse."""
        text = json.dumps(
            {
                "version": VERSION,
                "incarnation": self.incarnation,
                "role": self.role,
                "name": self.name,
                "model": self.model,
                "grpc_address": self.grpc_address,
                "metrics_address": self.metrics_address,
                "transfer_scheme": self.transfer_scheme,
                "transfer_address": base64.b64encode(self.transfer_address).decode(),
                "fingerprint": dict(self.fingerprint),
                "block_size": self.block_size,
                "pool_blocks": self.pool_blocks,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
            }
        )
        WorkerRecord.from_json(text)
        return text

    @staticmethod
    def from_json(text: str | bytes) -> WorkerRecord:
        """Raises `StoreError` naming the field that is missing or wrong."""
        fields = _Fields("worker record", text)
        return WorkerRecord(
            incarnation=Incarnation(fields.text("incarnation")),
            role=fields.role("role"),
            name=fields.text("name"),
            model=fields.text("model"),
            grpc_address=fields.address("grpc_address"),
            metrics_address=fields.optional_address("metrics_address"),
            transfer_scheme=fields.text("transfer_scheme"),
            transfer_address=fields.bytes("transfer_address"),
            fingerprint=fields.texts("fingerprint", FINGERPRINT_FIELDS),
            block_size=fields.count("block_size", least=1),
            pool_blocks=fields.count("pool_blocks", least=1),
            max_model_len=fields.count("max_model_len", least=1),
            max_num_seqs=fields.count("max_num_seqs", least=1),
        )


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """What a worker has to do, as of its last renewal."""

    waiting_requests: int
    waiting_tokens: int
    """Prompt tokens accepted and not yet computed, of waiting and running requests alike."""
    running_requests: int
    free_blocks: int
    """Blocks that new work can have: free or cached without a user."""
    total_blocks: int
    prefill_tokens_per_s: float
    """Measured; 0 until something was measured."""
    decode_tokens_per_s: float
    relay_tokens_per_s: float = 0.0
    """Of how many tokens the KV leaves for a peer in a second; measured like the others."""
    cached_blocks: int = 0
    """Of the free ones those that keep a known prefix until somebody needs them."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "waiting_requests": self.waiting_requests,
                "waiting_tokens": self.waiting_tokens,
                "running_requests": self.running_requests,
                "free_blocks": self.free_blocks,
                "total_blocks": self.total_blocks,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "relay_tokens_per_s": self.relay_tokens_per_s,
                "cached_blocks": self.cached_blocks,
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> LoadRecord:
        """Raises `StoreError` naming the field that is missing or wrong."""
        fields = _Fields("load record", text)
        return LoadRecord(
            waiting_requests=fields.count("waiting_requests"),
            waiting_tokens=fields.count("waiting_tokens"),
            running_requests=fields.count("running_requests"),
            free_blocks=fields.count("free_blocks"),
            total_blocks=fields.count("total_blocks"),
            prefill_tokens_per_s=fields.rate("prefill_tokens_per_s"),
            decode_tokens_per_s=fields.rate("decode_tokens_per_s"),
            relay_tokens_per_s=fields.rate("relay_tokens_per_s"),
            cached_blocks=fields.optional_count("cached_blocks"),
        )


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """A router that is alive; work of one whose lease ended has no client any more."""

    incarnation: Incarnation
    name: str
    http_address: str
    admin_token: str = field(default="", repr=False)
    """Of its admin routes: for who may read this."""

    def to_json(self) -> str:
        """Raises `StoreError` for a record that `from_json` would refuse."""
        text = json.dumps(
            {
                "version": VERSION,
                "incarnation": self.incarnation,
                "name": self.name,
                "http_address": self.http_address,
                "admin_token": self.admin_token,
            }
        )
        RouterRecord.from_json(text)
        return text

    @staticmethod
    def from_json(text: str | bytes) -> RouterRecord:
        """Raises `StoreError` naming the field that is missing or wrong."""
        fields = _Fields("router record", text)
        return RouterRecord(
            incarnation=Incarnation(fields.text("incarnation")),
            name=fields.text("name"),
            http_address=fields.optional_address("http_address"),
            admin_token=fields.optional_text("admin_token"),
        )


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A request that has not ended, as its router last described it in the ledger."""

    leg: str
    router: str
    """Incarnation."""
    owned: bool
    """That router held a lease when this was read."""
    phase: str
    attempt: int
    nonce: int
    prefill: str
    """Incarnation, "" when the request needs none any more."""
    decode: str
    prompt_tokens: int
    output_tokens: int
    updated_ms: int
    """By Redis' clock."""

    @property
    def workers(self) -> frozenset[str]:
        """Who may hold something of it."""
        return frozenset((self.prefill, self.decode)) - {""}


def fingerprint_difference(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    """The first field that differs, with both values; None for equal fingerprints."""
    others = sorted({*a, *b}.difference(FINGERPRINT_FIELDS))
    for name in (*FINGERPRINT_FIELDS, *others):
        if a.get(name) != b.get(name):
            return f"{name}: {a.get(name, 'missing')} against {b.get(name, 'missing')}"
    return None


class _Fields:
    """One JSON object; each reader checks its field and raises a `StoreError` that names it."""

    def __init__(self, kind: str, text: str | bytes) -> None:
        self._kind = kind
        if len(text) > MAX_RECORD_BYTES:
            raise self._error("size", f"at most {MAX_RECORD_BYTES} bytes", f"{len(text)} bytes")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise self._error("json", "an object", "something unreadable") from None
        if not isinstance(value, dict):
            raise self._error("json", "an object", value)
        self._values: dict[str, object] = value
        if self._values.get("version") != VERSION:
            raise self._error("version", str(VERSION), self._values.get("version"))

    def _error(self, name: str, wanted: str, found: object) -> StoreError:
        shown = "nothing" if found is None else repr(found)[:80]
        return StoreError(f"{self._kind}: {name}: must be {wanted}, found {shown}")

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT_CHARS:
            raise self._error(name, f"a text of 1 to {MAX_TEXT_CHARS} characters", value)
        return value

    def optional_text(self, name: str) -> str:
        return "" if self._values.get(name) in ("", None) else self.text(name)

    def role(self, name: str) -> Role:
        value = self.text(name)
        if value not in list(Role):
            raise self._error(name, "one of " + ", ".join(Role), value)
        return Role(value)

    def address(self, name: str) -> str:
        value = self.text(name)
        host, _, port = value.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            raise self._error(name, "host:port", value)
        if is_wildcard(host):
            raise self._error(name, "an address that others can reach", value)
        return value

    def optional_address(self, name: str) -> str:
        return "" if self._values.get(name) == "" else self.address(name)

    def bytes(self, name: str) -> bytes:
        value = self._values.get(name)
        try:
            return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
        except (binascii.Error, ValueError):
            raise self._error(name, "base64", value) from None

    def texts(self, name: str, required: tuple[str, ...]) -> dict[str, str]:
        value = self._values.get(name)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._error(name, "an object of texts", value)
        for key in required:
            if key not in value:
                raise self._error(f"{name}.{key}", "a text", None)
        return value

    def count(self, name: str, least: int = 0) -> int:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_COUNT:
            raise self._error(name, f"an integer of {least} or more", value)
        return value

    def optional_count(self, name: str) -> int:
        return 0 if self._values.get(name) is None else self.count(name)

    def rate(self, name: str) -> float:
        value = self._values.get(name)
        # Written so that NaN, which compares with nothing, is refused too.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 <= value < MAX_COUNT
        ):
            return float(value)
        raise self._error(name, "a number of 0 or more", value)
