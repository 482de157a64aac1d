"""Bad requests and bad newcomers get a clear message; whoever runs beside them notices nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.clients import Neighbour, ask, token_ids
from tests.stack import Process, Stack, metrics, until
from tests.tinymodel import write_tiny_model

from kvrelay.shared.types import Role

LONG: dict[str, Any] = {
    "prompt": token_ids(random.Random("neighbour"), 90),
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 77,
}
POSITIONS = 2048
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"

# path, body, status, code, param, and what the message must say
WRONG: list[tuple[str, dict[str, Any], int, str, str, str]] = [
    (TEXT, {"prompt": ""}, 400, INVALID, "prompt", "empty"),
    (TEXT, {"prompt": []}, 400, INVALID, "prompt", "0"),
    (TEXT, {"prompt": [[]]}, 400, INVALID, "prompt", "empty"),
    (TEXT, {"prompt": ["x", ""]}, 400, INVALID, "prompt", "empty"),
    (TEXT, {}, 400, "missing_required_parameter", "prompt", "required"),
    (CHAT, {"messages": []}, 400, INVALID, "messages", "1"),
    (TEXT, {"prompt": [5] * 2048}, 400, "context_length_exceeded", "prompt", "2048 tokens"),
    (TEXT, {"prompt": "a word " * 700_000}, 400, "context_length_exceeded", "prompt", "2048"),
    (TEXT, {"prompt": "x", "max_tokens": 2049}, 400, INVALID, "max_tokens", "2048"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, INVALID, "max_tokens", "0"),
    (TEXT, {"prompt": "x", "max_tokens": -7}, 400, INVALID, "max_tokens", "-7"),
    (TEXT, {"prompt": "x", "model": "gpt-9"}, 404, "model_not_found", "model", "gpt-9"),
    (TEXT, {"prompt": "x", "model": "../../etc/passwd"}, 404, "model_not_found", "model", "etc"),
    (TEXT, {"prompt": "x", "temperature": "hot"}, 400, "invalid_type", "temperature", "hot"),
    (TEXT, {"prompt": 7}, 400, "invalid_type", "prompt", "string"),
    (CHAT, {"messages": "hi"}, 400, "invalid_type", "messages", "list"),
    (TEXT, {"prompt": "x", "logit_bias": {"999999": 1}}, 400, INVALID, "logit_bias", "999999"),
    (TEXT, {"prompt": "x", "no_such_field": 1}, 400, UNSUPPORTED, "no_such_field", ""),
    (TEXT, {"prompt": "x", "n": 10000}, 400, INVALID, "n", "10000"),
    (TEXT, {"prompt": ["x"] * 256}, 400, INVALID, "prompt", "256"),
    (TEXT, {"prompt": ["x"] * 100, "n": 100}, 400, INVALID, "n", "10000"),
    (TEXT, {"prompt": [5, -1]}, 400, INVALID, "prompt[1]", "-1"),
    (TEXT, {"prompt": [10**9]}, 400, INVALID, "prompt[0]", "1000000000"),
    (TEXT, {"prompt": "x", "stop_token_ids": [5, 409]}, 400, INVALID, "stop_token_ids[1]", "409"),
    (TEXT, {"prompt": "x", "stop_token_ids": [-1]}, 400, INVALID, "stop_token_ids[0]", "-1"),
]  # fmt: skip


@pytest.fixture(scope="session")
def long_answer(stacks: dict[str, Stack]) -> str:
    """Of an undisturbed, unsplit run."""
    return ask(stacks["unsplit"], TEXT, LONG).texts[0]


@pytest.fixture
def neighbour(split: Stack, unsplit: Stack, long_answer: str) -> Iterator[None]:
    with Neighbour(split, LONG, long_answer):
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("neighbour")
def test_each_wrong_request_is_refused_by_its_field(split: Stack, stream: bool) -> None:
    for path, body, status, code, param, words in WRONG:
        answer = split.post(path, **{**body, "stream": stream})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, param), error
        assert error["type"] == "invalid_request_error"
        assert (words or param) in error["message"], error


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"model": ', 400, "not valid JSON"),
        (b'{"prompt": "a \xff b"}', 400, "Unicode"),
        (b'{"prompt": "a \\ud83d b"}', 400, "Unicode"),
        (b"[" * 100_000, 400, "nested too deep"),
        (b'{"prompt": ' + b"1" * 100_000 + b"}", 400, "too many digits"),
        (b"[1]", 400, "a list"),
        (b'{"prompt": "' + b"x" * (10 << 20) + b'"}', 413, "8388608 bytes"),
    ],
    ids=["cut", "no UTF-8", "half a pair", "deep", "digits", "no object", "10 MB"],
)
@pytest.mark.usefixtures("neighbour")
def test_what_is_no_request_at_all_is_refused(
    split: Stack, content: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = split.http.post(f"{split.url}{TEXT}", content=content, headers=headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.usefixtures("neighbour")
def test_what_is_just_legal_is_served(split: Stack) -> None:
    longest = token_ids(random.Random("longest"), POSITIONS - 1)
    answer = ask(split, TEXT, {"prompt": longest, "ignore_eos": True})
    assert (answer.finishes, answer.usage["completion_tokens"]) == (("length",), 1)
    many = ask(split, TEXT, {"prompt": [[5 + i] for i in range(128)], "max_tokens": 1})
    assert (len(many.texts), many.usage["prompt_tokens"]) == (128, 128)


OLD_PROTOCOL = (
    "import sys; from kvrelay.shared.rpc import convert; convert.PROTOCOL -= 1; "
    "from kvrelay.services.entry import process; sys.exit(process())"
)


@pytest.fixture
def newcomers(split: Stack, tmp_path: Path) -> Iterator[dict[str, Process]]:
    """Each by the one field in which it differs from the others."""

    def model(name: str, **changed: Any) -> str:
        shape = {"head_dim": 64, "max_position_embeddings": POSITIONS, **changed}
        return str(write_tiny_model(tmp_path / name, **shape))

    words = Path(model("words")) / "tokenizer.json"
    tokenizer = json.loads(words.read_text())
    tokenizer["model"]["merges"].pop()
    words.write_text(json.dumps(tokenizer))
    portable = "portable" in split.decodes[0].detail["kernels"]
    misfits: dict[str, tuple[Role, dict[str, Any]]] = {
        "protocol": (Role.PREFILL, {}),
        "layout": (Role.DECODE, {"model": model("layers", layers=3)}),
        "dtype": (Role.PREFILL, {"dtype": "float32"}),
        "block_size": (Role.DECODE, {"block_size": 32}),
        "weights": (Role.PREFILL, {"model": model("other", seed=1)}),
        "tokenizer": (Role.DECODE, {"model": str(words.parent)}),
        "numerics": (Role.PREFILL, {"kernels": "reference" if portable else "native-portable"}),
        "transport": (Role.DECODE, {"transport": "tcp"}),
    }
    started = {
        field: split.make_worker(role, number, kv_cache_memory_bytes=1 << 20, **changed)
        for number, (field, (role, changed)) in enumerate(misfits.items(), 10)
    }
    started["protocol"].command[1:3] = ["-c", OLD_PROTOCOL]
    for worker in started.values():
        worker.start(wait=False)
    for worker in started.values():
        worker.wait_ready()
    yield started
    for worker in started.values():
        worker.end()


@pytest.mark.usefixtures("neighbour")
def test_workers_that_do_not_fit_are_reported_and_never_paired(
    split: Stack, unsplit: Stack, newcomers: dict[str, Process]
) -> None:
    for field, worker in newcomers.items():
        report = f"{worker.name} is not paired with"
        until(lambda text=report: bool(said(split, text)), 5.0, f"the router reports {worker.name}")
        [line] = said(split, report)
        assert f": {field}: " in line
    findings = doctor(split)
    for field, worker in newcomers.items():
        [finding] = [line for line in findings if f"wrong {worker.name}: " in line]
        assert "is paired with nobody" in finding and f" in {field}: " in finding
    rng = random.Random("beside misfits")
    requests = [
        {"prompt": token_ids(rng, count), "max_tokens": 8, "seed": 3} for count in (20, 300, 1500)
    ]
    answers = [ask(split, TEXT, request) for request in requests]
    assert answers == [ask(unsplit, TEXT, request) for request in requests]
    for worker in newcomers.values():
        assert metrics(worker)["kvrelay_steps_total"] == 0
        assert "met decode worker" not in worker.log.read_text()


def doctor(stack: Stack) -> list[str]:
    """The lines of its report, of a cluster that is not well."""
    program = [sys.executable, "-m", "kvrelay.services.cli", "doctor", "--redis", stack.redis_url]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def said(stack: Stack, text: str) -> list[str]:
    """The lines of the router's log with this text."""
    return [line for line in stack.router.log.read_text().splitlines() if text in line]


@pytest.mark.parametrize("stack", ["small", "tcp"], indirect=True)
def test_a_request_that_can_never_fit_stops_nobody(stack: Stack) -> None:
    """B07: longer than the smallest pool of the group, though the model could take it."""
    prompt = token_ids(random.Random("never fits"), 1500)
    answer = stack.post(TEXT, prompt=prompt, max_tokens=4)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1024 tokens" in error["message"] and "1500 tokens" in error["message"]
    with ThreadPoolExecutor(20) as pool:
        bodies = [{"prompt": prompt[:at], "max_tokens": 2} for at in range(1, 21)]
        assert len([*pool.map(lambda body: ask(stack, TEXT, body), bodies)]) == 20


def test_an_answer_that_fills_the_pool_ends_by_its_length(small: Stack) -> None:
    prompt = token_ids(random.Random("fills"), 1000)
    answer = ask(small, TEXT, {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True})
    assert (answer.finishes, answer.usage["total_tokens"]) == (("length",), 1024)
