"""For all suites: a test leaves no thread and no child process behind; who runs beside whom."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import NoReturn

import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_JOIN_S = 2.0


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that ends with a thread or child process that it did not find.

    Those of wider fixtures and of libraries that keep a pool are marked `leaks_allowed`.
    """
    if request.node.get_closest_marker("leaks_allowed"):
        yield
        return
    threads = set(threading.enumerate())
    children = _children()
    yield
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in left:
        thread.join(_JOIN_S)
    alive = [t.name for t in left if t.is_alive()]
    assert not alive, f"threads left running: {alive}"
    new = [child for child in _children() if child not in children]
    _, stuck = psutil.wait_procs(new, timeout=_JOIN_S)
    assert not stuck, f"child processes left running: {stuck}"


@pytest.fixture(autouse=True)
def no_vanishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that ends this process would take all later ones with it, and look like success."""

    def refuse(status: int) -> NoReturn:
        raise AssertionError(f"os._exit({status}) was called")

    monkeypatch.setattr(os, "_exit", refuse)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


class _Scheduling(LoadFileScheduling):
    """File by file; all that need the clusters in one process, which starts those once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "tests/integration" if file.startswith("tests/integration/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling | None:
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
