"""Settings: which source wins, what is said about a bad one, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.services.router.config import RouterConfig
from kvrelay.services.sources import ALL_SETTINGS
from kvrelay.shared.config import Settings, check_known, masked, read_sources, resolve
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.types import Role
from kvrelay.shared.worker.config import WorkerConfig

BOTH = (RouterConfig, WorkerConfig)


def config_file(folder: Path, text: str) -> str:
    path = folder / "kvrelay.toml"
    path.write_text(text)
    return str(path)


def refusal(model: type[Settings], flags: dict[str, object], env: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(model, read_sources({"model": "m", **flags}, env))
    return str(error.value)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = config_file(
        tmp_path, 'model = "m"\nblock_size = 8\nmax_num_seqs = 9\n[worker]\nthreads = 3'
    )
    env = {"KVRELAY_BLOCK_SIZE": "32", "KVRELAY_MAX_NUM_SEQS": "10", "KVRELAY_CONFIG": file}
    outcome = resolve(WorkerConfig, read_sources({"block_size": "64"}, env))
    config = outcome.config
    assert (config.block_size, config.max_num_seqs, config.threads) == (64, 10, 3)
    assert config.log_level == "info"
    assert outcome.origins["block_size"] == "--block-size"
    assert outcome.origins["max_num_seqs"] == "KVRELAY_MAX_NUM_SEQS"
    assert outcome.origins["threads"] == f"[worker] threads in {file}"
    assert outcome.origins["model"] == f"model in {file}"
    assert outcome.origins["log_level"] == "default"


def test_only_prefill_workers_make_long_steps_unless_told() -> None:
    def step_tokens(**settings: object) -> int:
        return WorkerConfig.model_validate({"model": "m", **settings}).step_tokens

    assert [step_tokens(role=role) for role in ("prefill", "decode", "both")] == [512, 256, 256]
    assert step_tokens(role="prefill", max_num_batched_tokens=64) == 64


def test_a_services_table_wins_over_the_common_keys(tmp_path: Path) -> None:
    file = config_file(tmp_path, 'model = "m"\nlog_level = "info"\n[router]\nlog_level = "debug"')
    sources = read_sources({"config": file}, {})
    assert resolve(RouterConfig, sources).config.log_level == "debug"
    assert resolve(WorkerConfig, sources).config.log_level == "info"


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        ({"port": "65536"}, {}, "--port is '65536': input should be less than or equal to 65535"),
        ({}, {"KVRELAY_RPC_PORT": "x"}, "KVRELAY_RPC_PORT is 'x': input should be a valid integer"),
        ({"dtype": "int4"}, {}, "--dtype is 'int4': input should be 'bfloat16' or 'float32'"),
        ({"kv_cache_memory_bytes": "lots"}, {}, "--kv-cache-memory is 'lots': not a number"),
        ({"kv_cache_memory_bytes": "1KiB"}, {}, "--kv-cache-memory is '1KiB': input should be gre"),
        ({"redis_url": "http://h"}, {}, "--redis is 'http://h': must start with redis://"),
        ({"port": "9", "metrics_port": "9"}, {}, "port and metrics_port are both 9"),
        ({"host": "0.0.0.0"}, {}, "advertise_host is required when host is the wildcard '0.0.0.0'"),
        ({"advertise_host": "::"}, {}, "advertise_host is the wildcard '::'"),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_limit(
    flags: dict[str, object], env: dict[str, str], message: str
) -> None:
    assert refusal(WorkerConfig, flags, env).startswith(message)


def test_a_missing_required_setting_tells_all_three_ways_to_give_it() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(WorkerConfig, read_sources({}, {}))
    assert str(error.value) == "--model (or KVRELAY_MODEL, or model in the file) is required"


@pytest.mark.parametrize("port", ["KVRELAY_HTTP_PORT"])
def test_a_kubernetes_service_link_in_a_setting_is_explained(port: str) -> None:
    message = refusal(RouterConfig, {}, {port: "tcp://10.0.0.1:80"})
    assert message.startswith(f"{port} is 'tcp://10.0.0.1:80', which a Kubernetes Service link")
    assert "enableServiceLinks: false" in message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVRELAY_PORT", "tcp://10.0.0.1:80"),
        ("KVRELAY_SERVICE_HOST", "10.0.0.1"),
        ("KVRELAY_SERVICE_PORT_HTTP", "80"),
        ("KVRELAY_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("KVRELAY_ROUTER_PORT", "tcp://10.0.0.1:80"),
        ("REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("KVRELAY_CACHE_DIR", "/x"),
    ],
)
def test_variables_that_others_set_are_ignored(variable: str, value: str) -> None:
    sources = read_sources({"model": "m"}, {variable: value})
    check_known(sources, ALL_SETTINGS)
    assert resolve(RouterConfig, sources).config.port == 8000
    assert resolve(WorkerConfig, sources).config.port == 0


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("", {"KVRELAY_DTYP": "x"}, "KVRELAY_DTYP is not a setting; did you mean KVRELAY_DTYPE?"),
        ("", {"KVRELAY_PORT": "80"}, "KVRELAY_PORT is not a setting"),
        ("blok_size = 1", {}, "{file}: blok_size is not a setting; did you mean block_size?"),
        ("[worker]\nport = 1\nqueue_s = 1", {}, "{file}: [worker] queue_s is not a setting"),
        ("[routr]\nport = 1", {}, "{file}: [routr] is not a table; did you mean router?"),
    ],
)
def test_an_unknown_setting_is_named(
    tmp_path: Path, text: str, env: dict[str, str], message: str
) -> None:
    file = config_file(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        check_known(read_sources({"config": file}, env), ALL_SETTINGS)
    assert str(error.value).startswith(message.format(file=file))


@pytest.mark.parametrize(("text", "says"), [("port =", "is not valid TOML"), (None, "cannot read")])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    file = config_file(tmp_path, text) if text else str(tmp_path / "absent.toml")
    with pytest.raises(ConfigError) as error:
        read_sources({"config": file}, {})
    assert says in str(error.value)
    assert file in str(error.value)


@pytest.mark.parametrize("password", ["secret", "se@cr/et", "s:e@c"])
def test_a_password_is_shown_nowhere(password: str) -> None:
    url = f"redis://user:{password}@host:6379/0"
    for model in BOTH:
        outcome = resolve(model, read_sources({"model": "m"}, {"KVRELAY_REDIS_URL": url}))
        shown = "\n".join(outcome.lines()) + repr(outcome.config) + repr(outcome)
        assert password not in shown
        assert "redis = redis://user:***@host:6379/0 (KVRELAY_REDIS_URL)" in outcome.lines()
        assert outcome.config.to_env()["KVRELAY_REDIS_URL"] == url
    bad = f"http://user:{password}@host"
    assert password not in refusal(WorkerConfig, {}, {"KVRELAY_REDIS_URL": bad})
    assert masked(url) == "redis://user:***@host:6379/0"


@pytest.mark.parametrize("model", BOTH)
def test_a_configuration_travels_through_the_environment_unchanged(model: type[Settings]) -> None:
    given = {"model": "m", "redis_url": "redis://:p@h:1/2", "served_model_name": "a, b"}
    flags = {k: v for k, v in given.items() if k in model.model_fields}
    config = resolve(model, read_sources(flags, {})).config
    assert resolve(model, read_sources({}, config.to_env())).config == config


@pytest.mark.parametrize("model", ALL_SETTINGS)
def test_every_setting_has_a_sentence_about_it(model: type[Settings]) -> None:
    undocumented = [name for name, info in model.model_fields.items() if not info.description]
    assert undocumented == []


def test_no_environment_name_is_used_for_two_meanings() -> None:
    meanings: dict[str, set[str]] = {}
    for model in ALL_SETTINGS:
        for name, (_, variable) in model.names().items():
            meanings.setdefault(variable, set()).add(name)
    assert {v: names for v, names in meanings.items() if len(names) > 1} == {}
    assert "KVRELAY_HTTP_PORT" in meanings
    assert "KVRELAY_PORT" not in meanings


def test_sizes_are_understood_with_their_unit() -> None:
    for text, size_bytes in (("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1073741824", 1 << 30)):
        config = resolve(
            WorkerConfig, read_sources({"model": "m", "kv_cache_memory_bytes": text}, {})
        )
        assert config.config.kv_cache_memory_bytes == size_bytes


def test_a_configuration_is_frozen() -> None:
    config = WorkerConfig(model="m", role=Role.DECODE)
    with pytest.raises(ValidationError):
        config.block_size = 8


def test_workers_advertise_where_they_can_be_reached() -> None:
    assert WorkerConfig(model="m").advertised_host == "127.0.0.1"
    behind = WorkerConfig(model="m", host="0.0.0.0", advertise_host="10.0.0.7")
    assert behind.advertised_host == "10.0.0.7"


@pytest.mark.parametrize(
    ("model", "names", "served"),
    [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", (), ("SmolLM2-135M-Instruct",)),
        ("/m/tiny.gguf", (), ("tiny",)),
        ("Qwen/Qwen3-0.6B", (), ("Qwen/Qwen3-0.6B",)),
        ("/m/tiny.gguf", ("a", "b"), ("a", "b")),
    ],
)
def test_the_served_name_is_the_models_own_unless_given(
    model: str, names: tuple[str, ...], served: tuple[str, ...]
) -> None:
    assert RouterConfig(model=model, served_model_name=names).served_names == served
