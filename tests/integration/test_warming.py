"""Pairs connect before there is work for them, also after a restart: requests find open lanes."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from tests.stack import Process, Stack, running, until

RESTARTS = 3


def connections(a: Process, b: Process) -> int:
    """TCP connections between two processes of one machine that their relay could use."""

    def ends(process: Process) -> set[tuple[object, object]]:
        control = {int(process.detail[name].rpartition(":")[2]) for name in ("address", "metrics")}
        parent = psutil.Process(process.pid)
        return {
            (each.laddr, each.raddr)
            for child in (parent, *parent.children(recursive=True))
            for each in child.net_connections("tcp")
            if each.raddr and not {each.laddr.port, each.raddr.port} & control
        }

    return len(ends(a) & {(theirs, ours) for ours, theirs in ends(b)})


def warm(stack: Stack) -> bool:
    return stack.all_seen() and stack.ready()


@pytest.mark.leaks_allowed  # a worker is started again
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_the_first_request_after_a_restart_makes_no_connection(
    tmp_path: Path, tiny_model: Path, transport: str
) -> None:
    env = {"UCX_TLS": "tcp"}  # so that UCX's connections can be counted, too
    shape = {"kv_cache_memory_bytes": 32 << 20, "threads": 1, "transport": transport, "env": env}
    with running(tmp_path / "stack", tiny_model, **shape) as stack:
        prefill, decode = stack.prefills[0], stack.decodes[0]
        before = prefill.pid
        for number in range(RESTARTS):
            if number:
                decode.end(signal.SIGKILL)
                decode.start()
            until(lambda: warm(stack), 10, "the pair is used")
            there = connections(prefill, decode)
            relayed = stack.counted([prefill], 'kvrelay_relay_blocks_total{direction="sent"}')
            stack.complete([5 + number] * 100, max_tokens=4)
            assert (
                stack.counted([prefill], 'kvrelay_relay_blocks_total{direction="sent"}') > relayed
            )
            assert 0 < there == connections(prefill, decode)
        assert prefill.pid == before
