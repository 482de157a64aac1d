"""`kvrelay top`: what a terminal shows of a router, and how it says that there is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from tests.unit.test_dashboard import NOW_NS, facts, record
from typer.testing import CliRunner

from kvrelay.services import cli
from kvrelay.services.router.dashboard.cluster import cluster_page
from kvrelay.services.router.dashboard.requests import page
from kvrelay.services.top_view import duration
from kvrelay.shared.errors import KvrelayError, Unavailable

KEY = "open-sesame"
ANSWER = {
    **cluster_page(facts()),
    "requests": page(
        [
            record(3, id="r-new", outcome=None, ttft_s=None, duration_s=None),
            record(4, id="[bold]", outcome="bad_request"),
        ],
        NOW_NS,
    ),
}


class Router(BaseHTTPRequestHandler):
    body = json.dumps(ANSWER).encode()

    def do_GET(self) -> None:
        known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if known else 401)
        self.end_headers()
        if known and self.path == "/dashboard/api/cluster?requests=12":
            self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


class Odd(Router):
    body = b"[1, 2]"


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("KVRELAY_API_KEY", KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), getattr(request, "param", Router)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def top(*flags: str) -> str:
    done = CliRunner().invoke(cli.app, ["top", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_picture_of_everything(url: str) -> None:
    lines = [line.split() for line in top("--router", url, "--once").splitlines()]
    assert lines[0] == ["kvrelay", "tiny", "ready"]
    assert lines[1][:3] == ["in", "flight", "3,"]
    [prefill] = [line for line in lines if line[:2] == ["prefill-0", "prefill"]]
    assert prefill[4:] == ["40", "20", "40", "3", "2", "1,000", "50"]
    assert ["prefill-0", "decode-0", "2", "300", "6.9", "MB"] in lines
    [new, refused] = [line for line in lines if line[1:2] in (["r-new"], ["[bold]"])]
    assert new[2:] == ["waiting", "split", "40", "16", "8", "-", "3.00", "ms"]
    assert refused[2:4] == ["bad", "request"]


def test_json_is_what_the_router_said(url: str) -> None:
    assert json.loads(top("--router", url, "--json")) == ANSWER


def test_a_router_that_is_not_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable) as told:
        top("--router", f"http://127.0.0.1:{port}")
    assert str(told.value) == f"no router answers at http://127.0.0.1:{port}: Connection refused"


def test_a_key_that_is_missing_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY")
    with pytest.raises(KvrelayError, match=r"api-key: .* wants one of its API keys"):
        top("--router", url)


@pytest.mark.parametrize("url", [Odd], indirect=True)
def test_what_is_no_router_is_told_as_such(url: str) -> None:
    with pytest.raises(KvrelayError, match="does not answer as a router does"):
        top("--router", url)


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "-"),
        (0.0421, "42 us"),
        (3.14159, "3.14 ms"),
        (99.44, "99.4 ms"),
        (512.3, "512 ms"),
        (61_500, "61.50 s"),
        (240_000, "240 s"),
    ],
)
def test_durations_have_units(ms: float | None, shown: str) -> None:
    assert duration(ms) == shown
