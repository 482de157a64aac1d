"""`--record`: what each incarnation's engine is asked and answers goes into a file of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from kvrelay import __version__
from kvrelay.shared.engine.engine import Engine
from kvrelay.shared.engine.loop import Machine
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.types import Incarnation
from kvrelay.shared.worker.config import WorkerConfig

log = logging.getLogger(__name__)

Record: TypeAlias = Callable[[Engine, Incarnation], tuple[Machine, Callable[[], None]]]
"""(new engine, whose) -> what runs in its place, and what to call after its last call."""


def unrecorded(engine: Engine, incarnation: Incarnation) -> tuple[Machine, Callable[[], None]]:
    return engine, lambda: None


def recording(config: WorkerConfig, worker: str) -> Record:
    """How the engines of this worker are recorded. Raises `ConfigError` if they cannot be."""
    if not config.record:
        return unrecorded
    from kvrelay.shared.engine.record.lines import Header
    from kvrelay.shared.engine.record.recorded import RecordedEngine
    from kvrelay.shared.engine.record.writer import RecordWriter, check_folder, record_path

    folder = Path(config.record).expanduser()
    check_folder(folder)

    def record(engine: Engine, incarnation: Incarnation) -> tuple[Machine, Callable[[], None]]:
        state = engine.state
        header = Header(state.limits, state.pool.total, f"{worker} {incarnation}", __version__)
        path = record_path(folder, re.sub(r"[^\w.-]", "_", worker), incarnation)
        try:
            writer = RecordWriter(path, header, config.record_limit_bytes)
        except ConfigError as error:
            log.warning("not recorded: %s", error)  # the folder was there when this worker began
            return engine, lambda: None
        log.info("recording to %s: it holds the token ids of prompts and answers", path)
        return RecordedEngine(engine, writer.note), writer.close

    return record
