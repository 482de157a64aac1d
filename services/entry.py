"""Where the `kvrelay` command begins: before anything is imported that takes time."""

from __future__ import annotations

import signal
from typing import NoReturn


def process() -> NoReturn:
    """Nothing has begun until all is imported: a Ctrl-C before that just ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvrelay.services import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.process()
