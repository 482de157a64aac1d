"""The router's streams to the workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

LAST_LINK_ENDS = """
import asyncio, gc, os, sys, threading
from kvrelay.services.router.links import Link, keep_library

async def main():
    if sys.argv[1] == "kept":
        keep_library()
    link = Link("w", "ipv4:127.0.0.1:1", "r", lambda *_: None, lambda _: None)
    while threading.active_count() == 1:  # until gRPC's poller is there
        await asyncio.sleep(0.01)
    await link.close()
    del link
    for _ in range(30):  # its tasks end, and with them what they held
        await asyncio.sleep(0.01)
        gc.collect()
    print(threading.active_count(), flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize(("library", "threads"), [("kept", 2), ("dropped", 1)])
def test_the_last_link_that_ends_does_not_shut_grpc_down(library: str, threads: int) -> None:
    """In a process of its own, for any channel elsewhere would keep the library, too.

    The second case is gRPC's behaviour that the first one guards against: when it is gone, so may
    be `keep_library`.
    """
    program = [sys.executable, "-c", LAST_LINK_ENDS, library]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30)
    assert int(done.stdout) == threads
