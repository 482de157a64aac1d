"""Records: what a reader takes, and how it refuses the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvrelay.shared.errors import StoreError
from kvrelay.shared.store.records import (
    FINGERPRINT_FIELDS,
    LoadRecord,
    RouterRecord,
    WorkerRecord,
    fingerprint_difference,
)
from kvrelay.shared.types import Incarnation, Role

FINGERPRINT = {name: f"{name}-1" for name in FINGERPRINT_FIELDS}
WORKER = WorkerRecord(
    incarnation=Incarnation("a" * 32),
    role=Role.DECODE,
    name="decode-0",
    model="SmolLM2",
    grpc_address="10.0.0.2:5001",
    metrics_address="[fd00::2]:9001",
    transfer_scheme="ucx",
    transfer_address=bytes(range(256)),
    fingerprint=FINGERPRINT,
    block_size=16,
    pool_blocks=1024,
    max_model_len=2048,
    max_num_seqs=32,
)
LOAD = LoadRecord(0, 0, 0, 10, 10, 0.0, 12.5)


def changed(text: str, **fields: object) -> str:
    return json.dumps({**json.loads(text), **fields})


def without(text: str, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != name})


def test_records_survive_the_round_trip() -> None:
    router = RouterRecord(Incarnation("b" * 32), "router-0", "10.0.0.1:8000")
    assert WorkerRecord.from_json(WORKER.to_json()) == WORKER
    assert LoadRecord.from_json(LOAD.to_json().encode()) == LOAD
    assert RouterRecord.from_json(router.to_json()) == router


def test_fields_of_a_later_build_are_ignored() -> None:
    assert WorkerRecord.from_json(changed(WORKER.to_json(), colour="red")) == WORKER


@pytest.mark.parametrize("name", [*json.loads(WORKER.to_json())])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(StoreError, match=f"^worker record: {name}: must be .*, found nothing$"):
        WorkerRecord.from_json(without(WORKER.to_json(), name))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version: must be 1, found 2"),
        ("role", "boss", "role: must be one of prefill, decode, both, found 'boss'"),
        ("name", "", "name: must be a text of 1 to 512 characters, found ''"),
        ("grpc_address", "host", "grpc_address: must be host:port, found 'host'"),
        ("grpc_address", "h:0", "grpc_address: must be host:port, found 'h:0'"),
        ("grpc_address", "h:²", "grpc_address: must be host:port, found 'h:²'"),
        (
            "metrics_address",
            "[::]:1",
            "metrics_address: must be an address that others can reach, found '[::]:1'",
        ),
        ("transfer_address", "no!", "transfer_address: must be base64, found 'no!'"),
        ("transfer_address", "é", "transfer_address: must be base64, found 'é'"),
        ("fingerprint", {"dtype": 1}, "fingerprint: must be an object of texts"),
        ("fingerprint", {}, "fingerprint.protocol: must be a text, found nothing"),
        ("block_size", True, "block_size: must be an integer of 1 or more, found True"),
        ("block_size", 0, "block_size: must be an integer of 1 or more, found 0"),
        ("pool_blocks", 1.5, "pool_blocks: must be an integer of 1 or more, found 1.5"),
        ("pool_blocks", 2**53, "pool_blocks: must be an integer of 1 or more, found 9007"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(StoreError) as refused:
        WorkerRecord.from_json(changed(WORKER.to_json(), **{field: value}))
    assert str(refused.value).startswith(f"worker record: {message}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "1", 10**400])
def test_a_rate_that_is_no_rate_is_refused(value: object) -> None:
    with pytest.raises(StoreError, match=r"^load record: prefill_tokens_per_s: must be a number"):
        LoadRecord.from_json(changed(LOAD.to_json(), prefill_tokens_per_s=value))


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "\xff", b"\xff\xfe", "[" * 15_000, "9" * 15_000]
)
def test_garbage_is_refused_with_one_line(text: str | bytes) -> None:
    with pytest.raises(StoreError, match=r"^load record: json: must be an object, found .{1,90}$"):
        LoadRecord.from_json(text)


def test_an_oversized_record_is_refused_unread_and_never_written() -> None:
    with pytest.raises(StoreError, match="size: must be at most 16384 bytes, found '20000 bytes'"):
        WorkerRecord.from_json(b"x" * 20_000)
    with pytest.raises(StoreError, match="size: must be at most 16384 bytes"):
        replace(WORKER, transfer_address=bytes(15_000)).to_json()


def test_groups_are_equal_exactly_for_equal_fingerprints() -> None:
    reordered = replace(WORKER, fingerprint=dict(reversed(FINGERPRINT.items())))
    assert reordered.group == WORKER.group
    for name in FINGERPRINT_FIELDS:
        other = replace(WORKER, fingerprint={**FINGERPRINT, name: "2"})
        assert other.group != WORKER.group


def test_the_first_field_that_differs_is_named_with_both_values() -> None:
    assert fingerprint_difference(FINGERPRINT, dict(FINGERPRINT)) is None
    other = {**FINGERPRINT, "weights": "w2", "dtype": "float32"}
    assert fingerprint_difference(FINGERPRINT, other) == "dtype: dtype-1 against float32"
    more = {**FINGERPRINT, "zone": "a"}
    assert fingerprint_difference(FINGERPRINT, more) == "zone: missing against a"
