"""The command line: what it hands to the services, and what it tells people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.tinymodel import write_tiny_model
from typer.testing import CliRunner

from kvrelay import __version__
from kvrelay.services import cli, up
from kvrelay.services.deployment import Deployment
from kvrelay.services.router.config import RouterConfig
from kvrelay.shared.errors import ConfigError, KvrelayError
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

Start = Callable[..., list[object]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("KVRELAY_CONFIG", "KVRELAY_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    return str(write_tiny_model(tmp_path / "tiny"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a command with services that only note their configuration and end with 0."""
    seen: list[object] = []

    def run(config: object, *_: object) -> int:
        seen.append(config)
        return 0

    for name in ("router", "prefill", "decode"):
        module = ModuleType(f"kvrelay.services.{name}.app")
        vars(module)["run"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(up, "run", run)

    def invoke(*arguments: str) -> list[object]:
        outcome = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return seen

    return invoke


def test_each_worker_command_has_its_role(start: Start, model: str) -> None:
    start("prefill", "--model", model)
    start("decode", "--model", model)
    configs = start("decode", "--role", "both", "--model", model)
    roles = [c.role for c in configs if isinstance(c, WorkerConfig)]
    assert roles == [Role.PREFILL, Role.DECODE, Role.BOTH]


def test_the_command_decides_the_role_whatever_the_environment_says(
    start: Start, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_ROLE", "both")
    [config] = start("prefill", "--model", model)
    assert isinstance(config, WorkerConfig)
    assert config.role is Role.PREFILL


def test_the_resolved_configuration_is_printed_masked(
    start: Start, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_REDIS_URL", "redis://:secret@h:1")
    monkeypatch.setattr(sys, "argv", ["kvrelay", "router", "--model", model, "--port", "8123"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capfd.readouterr().err
    assert end.value.code == 0
    assert "config: port = 8123 (--port)" in said
    assert "config: redis = redis://:***@h:1 (KVRELAY_REDIS_URL)" in said
    assert "secret" not in said


def test_up_gives_each_part_its_settings(start: Start, model: str) -> None:
    flags = "--prefill 2 --port 8123 --dtype float32 --threads 1 --served-model-name a,b"
    [deployment] = start("up", "--model", model, *flags.split())
    assert isinstance(deployment, Deployment)
    assert (deployment.up.prefill, deployment.up.decode, deployment.up.unsplit) == (2, 1, False)
    assert (deployment.router.port, deployment.router.served_names) == (8123, ("a", "b"))
    assert (deployment.worker.port, deployment.worker.dtype) == (0, "float32")
    assert (deployment.worker.threads, deployment.worker.model) == (1, model)
    assert not deployment.external_redis


def test_up_starts_no_store_when_a_redis_is_given(start: Start, model: str) -> None:
    [deployment] = start("up", "--model", model, "--redis", "redis://h:1")
    assert isinstance(deployment, Deployment)
    assert deployment.external_redis
    assert deployment.worker.redis_url == deployment.router.redis_url == "redis://h:1"


def ends_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, list[str]]:
    monkeypatch.setattr(sys, "argv", ["kvrelay", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    lines = capfd.readouterr().err.splitlines()
    return end.value.code, [line for line in lines if not line.startswith("config:")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("router", "--port", "70000"), "error: --port is '70000': input should be less than or"),
        (("decode", "--model", "/no/such/model"), "error: model: /no/such/model does not exist"),
        (("up", "--model", "/no/such/model"), "error: model: /no/such/model does not exist"),
        (("prefill", "--config", "/no/such.toml"), "error: config: cannot read /no/such.toml"),
        (("prefill",), "error: model: {cache}/models/SmolLM2-135M-Instruct.Q4_1.gguf does not"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    message: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, lines = ends_with(monkeypatch, capfd, *arguments)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(message.format(cache=Path(model).parent / "cache"))


@pytest.mark.parametrize(("error", "code"), [(KvrelayError("boom"), 1), (ConfigError("boom"), 2)])
def test_a_services_named_error_is_one_line(
    error: KvrelayError,
    code: int,
    start: Start,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: RouterConfig) -> int:
        raise error

    monkeypatch.setattr(sys.modules["kvrelay.services.router.app"], "run", fail)
    assert ends_with(monkeypatch, capfd, "router", "--model", model) == (code, ["error: boom"])


def test_help_teaches_every_command_and_setting() -> None:
    everything = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("up", "router", "prefill", "decode", "replay", "model", "version"):
        assert f" {command} " in everything
    flags = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["up", "--help"]).output
    promised = """--model --prefill --decode --unsplit --redis --port --dtype --block-size --threads
        --max-model-len --max-num-seqs --max-num-batched-tokens --kv-cache-memory
        --served-model-name --record --record-limit"""
    assert [flag for flag in promised.split() if f" {flag} " not in flags] == []
    assert "kvrelay up --unsplit" in flags


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(cli.app, ["version"]).output == f"{__version__}\n"
