"""Commands that look at a cluster find the one that `kvrelay up` runs here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.services.audit.config import AuditConfig
from kvrelay.services.local import announce, of_this_machine
from kvrelay.shared.config import Resolved, read_sources, resolve
from kvrelay.shared.errors import ConfigError

DEFAULT = "redis://127.0.0.1:6379/0"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    return tmp_path


def up_runs(cache: Path, pid: int, port: int, day: int = 10) -> Path:
    folder = cache / "runs" / f"197001{day}-000000-{pid}"
    folder.mkdir(parents=True)
    announce(folder, f"redis://:secret@127.0.0.1:{port}/0", "mine")
    return folder


def asked(**flags: str) -> Resolved[AuditConfig]:
    return resolve(AuditConfig, read_sources(flags, {}))


def test_it_is_found_while_it_runs(cache: Path) -> None:
    assert of_this_machine(asked()).redis_url == DEFAULT
    up_runs(cache, 1 << 30, 7001)
    assert of_this_machine(asked()).redis_url == DEFAULT, "that one has ended"
    folder = up_runs(cache, os.getpid(), 7002)
    config = of_this_machine(asked())
    assert (config.redis_url, config.cluster) == ("redis://:secret@127.0.0.1:7002/0", "mine")
    assert (folder / "cluster.json").stat().st_mode & 0o777 == 0o600


def test_what_was_said_counts_more(cache: Path) -> None:
    up_runs(cache, os.getpid(), 7002)
    given = of_this_machine(asked(redis_url="redis://10.0.0.5:6379/0"))
    assert (given.redis_url, given.cluster) == ("redis://10.0.0.5:6379/0", "kvrelay")
    assert of_this_machine(asked(cluster="other")).cluster == "other"


def test_of_several_one_must_be_named(cache: Path) -> None:
    up_runs(cache, os.getpid(), 7002)
    up_runs(cache, os.getppid(), 7003, day=11)
    with pytest.raises(ConfigError) as caught:
        of_this_machine(asked())
    assert str(caught.value) == (
        "redis: 2 clusters run here, name one: 127.0.0.1:7002/0, 127.0.0.1:7003/0"
    )
