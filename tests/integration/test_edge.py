"""A real router with API keys and an admin port: who gets in where, and what nobody ever reads."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from tests.stack import Stack, until

from kvrelay.shared.types import Role

KEY, FILE_KEY, OTHER_KEY = "sk-marker-given", "sk-marker-file", "sk-marker-later"
PROMPT, HEADER, WRONG_KEY = "marker-prompt", "marker-header", "sk-marker-wrong"
SECRETS = (KEY, FILE_KEY, OTHER_KEY, PROMPT, HEADER, WRONG_KEY)


class Sink:
    """Takes the traces that the parts send."""

    def __init__(self) -> None:
        bodies: list[bytes] = []

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.bodies = bodies
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.close()


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sink: Sink
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.write_text(f"# of a file\n{FILE_KEY}\n")
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.server.server_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    stack = Stack(
        *(folder / "stack", tiny_model, 0, 0, env),
        **{"kv_cache_memory_bytes": 8 << 20, "threads": 1, "log_level": "debug"},
        **{"api_key": (KEY,), "api_key_file": str(keys), "admin_port": 0},
        **{"max_output_tokens": 8, "lenient_fields": True},
    )
    stack.workers = [stack.make_worker(Role.BOTH, 0, log_level="debug")]
    try:
        stack.launch()
        for part in (*stack.workers, stack.router):
            part.wait_ready()
        stack.url = f"http://{stack.router.detail['address']}"
        until(stack.ready, 30, "the router is ready")
        yield stack
    finally:
        stack.stop()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def models(stack: Stack, key: str) -> int:
    return stack.http.get(f"{stack.url}/v1/models", headers=bearer(key)).status_code


def test_a_key_of_either_kind_opens_and_no_other(guarded: Stack) -> None:
    assert [models(guarded, key) for key in (KEY, FILE_KEY, WRONG_KEY)] == [200, 200, 401]


def test_the_admin_port_has_what_the_other_has_not(guarded: Stack) -> None:
    admin = f"http://{guarded.router.detail['admin']}"
    get = guarded.http.get
    assert "kvrelay_requests_in_flight" in get(f"{admin}/metrics").text
    assert [get(f"{admin}/{probe}").status_code for probe in ("health", "ready")] == [200, 200]
    assert [get(f"{admin}{path}").status_code for path in ("/admin/legs", "/v1/models")] == [
        401,
        404,
    ]
    for path in ("/metrics", "/admin/legs"):
        assert get(f"{guarded.url}{path}").status_code == 401
        assert get(f"{guarded.url}{path}", headers=bearer(KEY)).status_code == 404


def test_keys_are_read_again_on_sighup(guarded: Stack) -> None:
    (guarded.folder.parent / "keys").write_text(f"{OTHER_KEY}\n")
    guarded.router.kill(signal.SIGHUP)
    until(lambda: models(guarded, OTHER_KEY) == 200, 10, "the new key opens")
    assert [models(guarded, key) for key in (KEY, FILE_KEY)] == [200, 401]


def asked(stack: Stack, **fields: object) -> httpx.Response:
    headers = bearer(KEY) | {"x-unknown": HEADER, "cookie": HEADER}
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 4, **fields}
    return stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers)


def test_no_secret_and_nothing_of_a_prompt_is_written_anywhere(guarded: Stack, sink: Sink) -> None:
    models(guarded, WRONG_KEY)
    answers = [
        asked(guarded),
        asked(guarded, stream=True),
        asked(guarded, unknown=PROMPT),
        asked(guarded, max_tokens=9),
        asked(guarded, temperature=PROMPT),
        asked(guarded, guided_regex=PROMPT),
        asked(guarded, guided_regex=f"{PROMPT}("),
        asked(guarded, model=PROMPT),
        asked(guarded, prompt=f"{PROMPT} " * 3000),
        guarded.http.post(f"{guarded.url}/tokenize", json={"prompt": PROMPT}, headers=bearer(KEY)),
    ]
    assert [answer.status_code for answer in answers] == [
        200,
        200,
        200,
        400,
        400,
        200,
        400,
        404,
        400,
        200,
    ]
    until(lambda: any(b"gen_ai" in body for body in sink.bodies), 10, "a trace has come")
    parts = [guarded.router, *guarded.workers]
    logs = {part.name: part.log.read_bytes() for part in parts}
    assert all(b'"level": "debug"' in log or b"config: " in log for log in logs.values())
    lines = {
        f"{part.name}'s command line": Path(f"/proc/{part.pid}/cmdline").read_bytes()
        for part in parts
    }
    environments = {
        f"{part.name}'s environment": Path(f"/proc/{part.pid}/environ").read_bytes()
        for part in guarded.workers
    }
    for where, text in {**logs, **lines, **environments, "traces": b"".join(sink.bodies)}.items():
        for secret in SECRETS:
            assert secret.encode() not in text, f"{secret} stands in {where}"


def test_lines_about_a_request_name_it_and_its_trace_and_nothing_of_its_answer(
    guarded: Stack,
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = bearer(KEY) | {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"model": guarded.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    answer = guarded.http.post(f"{guarded.url}/v1/completions", json=body, headers=headers)
    request = answer.headers["x-request-id"]
    for part in (guarded.router, *guarded.workers):
        until(lambda part=part: request in part.log.read_text(), 5, f"{part.name} told of it")
        lines = [line for line in part.log.read_text().splitlines() if line.startswith("{")]
        told = [json.loads(line) for line in lines if request in line]
        assert {(line["request"], line["trace"]) for line in told} == {(request, trace)}, told
        assert answer.json()["choices"][0]["text"] not in "\n".join(lines)


def test_a_router_is_drained_by_who_reads_its_token(guarded: Stack) -> None:
    """The last test: afterwards there is none."""
    import redis

    admin = f"http://{guarded.router.detail['admin']}/admin/drain"
    assert guarded.http.post(admin).status_code == 401
    assert guarded.http.post(admin, headers=bearer(KEY)).status_code == 401
    with redis.Redis.from_url(guarded.redis_url) as client:
        (name,) = client.keys("*router:*")
        record = client.get(name) or b""
    token = json.loads(record)["admin_token"]
    assert guarded.http.post(admin, headers=bearer(token)).status_code == 202
    assert guarded.router.wait(20) == 0
